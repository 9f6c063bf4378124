"""Turns what torch.export concludes about sizes into other dynamic sizes, written as on the command line."""

from __future__ import annotations

import operator
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy
import sympy
from torch.utils._sympy.functions import FloorDiv

from exportkit.errors import UsageError
from exportkit.export.sizes.shapes import DynamicSizes, dynamic_sizes
from exportkit.export.sizes.tried_sizes import allowed
from exportkit.package.manifest import Size

_STEPS = 64  # the greatest factor that is looked for
_SCANNED = 100_000  # values of a range for which conditions are computed, in each direction from the example's

Examples = Mapping[str, Sequence[int]]
"""The example inputs' sizes, by name."""


@dataclass(frozen=True)
class SizeChange:
    """Another size for one place.

    Attributes:
        place: Such as "image:2".
        before: Such as "h[32:128]", or the number of a fixed size.
        after: In the same form.
        meaning: What that says, such as "image:2 is a multiple of 16".
        narrows: Whether the smallest or the largest size is lost, or the size is fixed. docs/adr/0019 has the rule.
    """

    place: str
    before: str
    after: str
    meaning: str
    narrows: bool

    @property
    def option(self) -> str:
        """The change as an option of the command line, quoted for a shell."""
        return f"--dynamic {shlex.quote(f'{self.place}={self.after}')}"


def proposals(sizes: DynamicSizes, examples: Examples, conditions: Sequence[sympy.Basic]) -> list[DynamicSizes]:
    """Returns the sizes to try instead of those that are refused for conditions in names, the most promising first."""
    found: list[DynamicSizes] = []
    for steps in (_STEPS, 1):
        edit = _Edit(sizes)
        edit.tie(conditions)
        for name in list(edit.ranges):
            edit.narrow(name, [each for each in conditions if {s.name for s in each.free_symbols} == {name}], steps)
        try:
            proposed = dynamic_sizes(edit.texts(), examples)
        except UsageError:
            continue  # the example inputs do not have such sizes
        if proposed != sizes and proposed not in found:
            found.append(proposed)
    return found


def sizes_as_texts(sizes: DynamicSizes) -> dict[str, dict[int, str]]:
    """Returns sizes as ExportSpec.dynamic_shapes has them."""
    return _Edit(sizes).texts()


class _Edit:
    """Dynamic sizes that change step by step."""

    def __init__(self, sizes: DynamicSizes) -> None:
        self.places, self.example = dict(sizes.by_axis), sizes.example
        self.ranges = {dimension.name: (dimension.min, dimension.max) for dimension in sizes.dimensions}

    def tie(self, conditions: Sequence[sympy.Basic]) -> None:
        """Lets a name follow another where an equation says so: that with the wider range, or else the later one."""
        for condition in conditions:
            names, order = condition.free_symbols, list(self.ranges)
            if isinstance(condition, sympy.Eq) and len(names) == 2 and all(s.name in order for s in names):
                widths = {name: high - low for name, (low, high) in self.ranges.items()}
                # Where it divides, only whole quotients are wanted.
                difference = (condition.lhs - condition.rhs).replace(FloorDiv, operator.truediv)
                for symbol in sorted(names, key=lambda s: (widths[s.name], order.index(s.name)), reverse=True):
                    if (solution := _solved(sympy.expand(difference), symbol)) is not None:
                        self._substitute(symbol.name, *solution)
                        break

    def narrow(self, name: str, conditions: Sequence[sympy.Basic], steps: int) -> None:
        """Keeps the values of a name around the example's for which conditions on it hold.

        Where an equation holds for every n-th value, those are kept, with the least n up to `steps`.
        """
        if not conditions:
            return
        (low, high), example = self.ranges[name], self.example[name]
        first = max(low, example - _SCANNED)
        values = numpy.arange(first, min(high, example + _SCANNED) + 1)
        # Tracing takes every size to be at least 2: what fails below is no matter of these conditions.
        least = max(-((size.offset - 2) // size.scale) for size in self.places.values() if size.dimension == name)
        equal, fits = (
            allowed(each, values) | (values < least)
            for each in ([c for c in conditions if isinstance(c, sympy.Eq)], conditions)
        )
        step = next((n for n in range(1, steps + 1) if _holds_in_steps(equal, example - first, n)), 1)
        start = (example - first) % step
        at, fails = (example - first) // step, numpy.flatnonzero(~fits[start::step])
        before, after = fails[fails < at], fails[fails > at]
        low = first + start + step * (int(before[-1]) + 1) if len(before) else low
        high = first + start + step * (int(after[0]) - 1) if len(after) else high
        if high == least:  # nothing speaks for those below, which no condition is about
            low = high
        self.ranges[name] = (low, high)
        if low == high:
            self.places = {place: size for place, size in self.places.items() if size.dimension != name}
        elif step > 1:
            self._substitute(name, name, step, example % step)

    def texts(self) -> dict[str, dict[int, str]]:
        """Returns the sizes as in ExportSpec.dynamic_shapes."""
        shapes: dict[str, dict[int, str]] = {}
        for (tensor, dim), size in self.places.items():
            low, high = self.ranges[size.dimension]
            shapes.setdefault(tensor, {})[dim] = f"{size}[{low}:{high}]"
        return shapes

    def _substitute(self, name: str, root: str, scale: int, offset: int) -> None:
        """Replaces `name` by scale * root + offset. A root that nobody named, such as torch's `_h`, takes the name."""
        low, high = self.ranges.pop(name)
        low, high = -((offset - low) // scale), (high - offset) // scale
        root = root if root in self.ranges else name
        known = self.ranges.get(root, (low, high))
        for place, size in self.places.items():
            if size.dimension == name:
                self.places[place] = Size(
                    dimension=root, scale=size.scale * scale, offset=size.scale * offset + size.offset
                )
        self.ranges[root] = (max(low, known[0], 1 if offset <= 0 else 0), min(high, known[1]))


def _holds_in_steps(holds: numpy.ndarray, at: int, step: int) -> bool:
    values = holds[at % step :: step]
    return len(values) > 1 and bool(values.all())


def _solved(difference: sympy.Expr, symbol: sympy.Symbol) -> tuple[str, int, int] | None:
    """Returns another name, a factor and an offset that make a symbol where a difference is 0; None without such."""
    others = difference.free_symbols - {symbol}
    if len(others) != 1 or not difference.is_polynomial(symbol, *others):
        return None
    (other,) = others
    polynomial = sympy.Poly(difference, symbol, other)
    if polynomial.total_degree() != 1 or not (own := polynomial.coeff_monomial(symbol)):
        return None
    scale, offset = -polynomial.coeff_monomial(other) / own, -polynomial.coeff_monomial(1) / own
    return (other.name, int(scale), int(offset)) if scale.is_Integer and scale > 0 and offset.is_Integer else None


def changes_between(before: DynamicSizes, after: DynamicSizes, examples: Examples) -> tuple[SizeChange, ...]:
    """Returns the places whose size differs, in the order of the inputs, each with its whole range."""
    found = []
    old, new = _Edit(before).texts(), _Edit(after).texts()
    for tensor, shape in examples.items():
        for dim, actual in enumerate(shape):
            was = old.get(tensor, {}).get(dim, str(actual))
            now = new.get(tensor, {}).get(dim, str(actual))
            if was != now:
                place = f"{tensor}:{dim}"
                (low, high), (new_low, new_high) = (_ends(each, tensor, dim, actual) for each in (before, after))
                step = size.scale if (size := after.at(tensor, dim)) else 1
                # An end moved inwards by a whole step. A multiple may round it to its next value.
                narrows = new_low - low >= step or high - new_high >= step
                found.append(SizeChange(place, was, now, _meaning(place, before, after, actual), narrows))
    return tuple(found)


def _ends(sizes: DynamicSizes, tensor: str, dim: int, actual: int) -> tuple[int, int]:
    """Returns the smallest and the largest size of a place."""
    size = sizes.at(tensor, dim)
    if size is None:
        return actual, actual
    named = next(d for d in sizes.dimensions if d.name == size.dimension)
    return size.at({named.name: named.min}), size.at({named.name: named.max})


def _meaning(place: str, before: DynamicSizes, after: DynamicSizes, actual: int) -> str:
    tensor, _, dim = place.rpartition(":")
    was, now = before.at(tensor, int(dim)), after.at(tensor, int(dim))
    if now is None:
        return f"{place} is always {actual}"
    if was is None or was.dimension != now.dimension:
        return f"{place} follows `{now.dimension}`"
    if now.scale != was.scale or now.offset != was.offset:
        rest = now.offset % now.scale
        return f"{place} is a multiple of {now.scale}" + (f", plus {rest}" if rest else "")
    name = next(d for d in after.dimensions if d.name == now.dimension)
    return f"`{name.name}` is {name.min} to {name.max}"
