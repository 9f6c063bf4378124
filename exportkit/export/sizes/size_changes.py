"""Turns what torch.export concludes about sizes into other dynamic sizes, written as on the command line."""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from exportkit.errors import UsageError
from exportkit.export.sizes.guards import GuardLog
from exportkit.export.sizes.shapes import DynamicSizes, dynamic_sizes
from exportkit.package.manifest import Size

_VIOLATED = re.compile(r"(?:Constraints violated|Specializations unexpectedly required) \(([^)]*)\)")
_SUGGESTED = re.compile(r"^  (\w+) = (.+)$", re.MULTILINE)
_LINEAR = re.compile(r"(?:(?P<scale>\d+)\*)?(?P<root>[A-Za-z_]\w*)(?: (?P<sign>[+-]) (?P<offset>\d+))?")
_STEPS = 64  # the greatest factor that is looked for, and the multiples that are held against the recorded equations
_SCANNED = 1000  # values of a range that are held against the recorded conditions, in each direction from the example's

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


def violated_names(text: str) -> list[str]:
    """Returns the names in torch's error about sizes; empty for any other error."""
    return [name for match in _VIOLATED.finditer(text) for name in re.findall(r"[A-Za-z_]\w*", match[1])]


def proposals(text: str, sizes: DynamicSizes, examples: Examples, log: GuardLog) -> list[DynamicSizes]:
    """Returns the sizes to try instead of those that torch.export refused, the most promising first."""
    _, _, suggestions = text.partition("Suggested fixes:")
    suggested = {match[1]: match[2].strip() for match in _SUGGESTED.finditer(suggestions)}
    if suggested:
        candidates = [_Edit(sizes).apply(suggested)]
    else:
        names = violated_names(text)
        candidates = [edit(names, sizes.example, log) for edit in (_Edit(sizes).in_steps, _Edit(sizes).hold)]
    found: list[DynamicSizes] = []
    for candidate in candidates:
        try:
            proposed = dynamic_sizes(candidate.texts(), examples)
        except UsageError:
            continue  # the example inputs do not have such sizes
        if proposed != sizes and proposed not in found:
            found.append(proposed)
    return found


def untrue_names(sizes: DynamicSizes, log: GuardLog) -> list[str]:
    """Returns the names with a factor or an offset, not all of whose values the recorded conditions allow.

    torch.export itself holds other names against their conditions.
    """
    derived = {size.dimension for size in sizes.by_axis.values() if size.scale != 1 or size.offset}
    return [
        name
        for name in sizes.example
        if name in derived and (_Edit(sizes).untrue(name, sizes.example[name], log) or log.bounded(name))
    ]


def sizes_as_texts(sizes: DynamicSizes) -> dict[str, dict[int, str]]:
    """Returns sizes as ExportSpec.dynamic_shapes has them."""
    return _Edit(sizes).texts()


class _Edit:
    """Dynamic sizes that change step by step."""

    def __init__(self, sizes: DynamicSizes) -> None:
        self.places, self.example = dict(sizes.by_axis), sizes.example
        self.ranges = {dimension.name: (dimension.min, dimension.max) for dimension in sizes.dimensions}

    def apply(self, suggested: Mapping[str, str]) -> _Edit:
        """Applies torch's suggestions, which belong together."""
        for name, value in suggested.items():
            if name not in self.ranges:
                continue  # a helper such as `_h`, which another suggestion uses
            if value.isdigit():
                self._fix(name)
            elif value.startswith("Dim("):
                least, most = low, high = self.ranges[name]
                low = int(m[1]) if (m := re.search(r"min=(\d+)", value)) else low
                high = int(m[1]) if (m := re.search(r"max=(\d+)", value)) else high
                # The sizes of a trace from another example, beside which the given one's lie.
                example = self.example.get(name, low)
                if example < low:
                    low, high = least, low - 1
                elif example > high:
                    low, high = high + 1, most
                self.ranges[name] = (low, high)
            elif match := _LINEAR.fullmatch(value):
                offset = int(match["offset"] or 0) * (-1 if match["sign"] == "-" else 1)
                self._substitute(name, match["root"], int(match["scale"] or 1), offset)
        return self

    def hold(self, names: Sequence[str], example: Mapping[str, int], log: GuardLog) -> _Edit:
        """Bounds each name to the values around the example's for which every recorded condition holds."""
        for name in names:
            if name not in self.ranges:
                continue
            holds = functools.partial(self._holds, name, log=log)
            low, high = self.ranges[name]
            self.ranges[name] = (
                _last(range(example[name], max(low, example[name] - _SCANNED) - 1, -1), holds, low),
                _last(range(example[name], min(high, example[name] + _SCANNED) + 1), holds, high),
            )
        return self

    def in_steps(self, names: Sequence[str], example: Mapping[str, int], log: GuardLog) -> _Edit:
        """Keeps of each name only every n-th value, with the least n for which every recorded equation holds."""
        for name in names:
            if name not in self.ranges:
                continue
            low, high = self.ranges[name]
            for step in range(1, _STEPS + 1):
                least = low + (example[name] - low) % step
                values = range(least, high + 1, step)[:_STEPS]
                if len(values) > 1 and all(self._holds(name, value, log=log, equations=True) for value in values):
                    if step > 1:
                        self._substitute(name, name, step, least % step)
                    break
        return self

    def untrue(self, name: str, example: int, log: GuardLog) -> bool:
        """Returns whether a recorded equation does not hold at an end of a name's range or beside the example."""
        low, high = self.ranges[name]
        values = {low, high, *(value for value in (example - 1, example + 1) if low <= value <= high)}
        return not all(self._holds(name, value, log=log, equations=True) for value in values)

    def _holds(self, name: str, value: int, *, log: GuardLog, equations: bool = False) -> bool:
        places = {f"{t}:{d}": size for (t, d), size in self.places.items() if size.dimension == name}
        sizes = {place: size.at({name: value}) for place, size in places.items()}
        return log.hold_at(sizes, equations=equations)

    def texts(self) -> dict[str, dict[int, str]]:
        """Returns the sizes as in ExportSpec.dynamic_shapes."""
        shapes: dict[str, dict[int, str]] = {}
        for (tensor, dim), size in self.places.items():
            low, high = self.ranges[size.dimension]
            shapes.setdefault(tensor, {})[dim] = f"{size}[{low}:{high}]"
        return shapes

    def _fix(self, name: str) -> None:
        self.places = {place: size for place, size in self.places.items() if size.dimension != name}

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


def _last(values: range, holds: Callable[[int], bool], end: int) -> int:
    """Returns the last value before the first that fails; `end` if none of them fails."""
    for value in values:
        if not holds(value):
            return value - values.step
    return end


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
