"""Translates dynamic sizes such as "image:2=16*gh[8:96]" to torch.export's dimensions, and back after tracing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import sympy
import torch

from exportkit.errors import ExportError, UsageError
from exportkit.export.models.option_parsing import parse_expression, size_of
from exportkit.package.manifest import Dimension, Size

MAX_SIZE = 2**31 - 1  # recorded if a program that exportkit did not write gives a dimension no upper end

Axis = tuple[str, int]
"""A tensor's name, and the index of one of its dimensions."""

Shapes = Mapping[str, Mapping[int, str]]
"""Tensor name -> dimension -> expression, as in ExportSpec.dynamic_shapes."""


@dataclass(frozen=True)
class DynamicSizes:
    """The dynamic sizes, checked against the example inputs.

    Attributes:
        dimensions: The named numbers, in the order of their first use.
        by_axis: The sizes that vary.
        example: The value of each name in the example inputs.
        free: Those whose sizes torch is to infer.
    """

    dimensions: tuple[Dimension, ...] = ()
    by_axis: Mapping[Axis, Size] = field(default_factory=dict)
    example: Mapping[str, int] = field(default_factory=dict)
    free: Sequence[Axis] = ()

    def at(self, tensor: str, dim: int) -> Size | None:
        """Returns the size at a place; None if it is fixed."""
        return self.by_axis.get((tensor, dim))


def with_ranges(shapes: Shapes, ranges: Mapping[str, tuple[int, int]]) -> dict[str, dict[int, str]]:
    """Returns the sizes with other ranges for the names that have one."""
    found: dict[str, dict[int, str]] = {}
    for tensor, dims in shapes.items():
        for dim, text in dims.items():
            if ranges and (size := size_of(text)) and size.dimension in ranges:
                low, high = ranges[size.dimension]
                text = f"{size}[{low}:{high}]"
            found.setdefault(tensor, {})[dim] = text
    return found


def merge_shapes(shapes: Shapes, replacements: Shapes) -> dict[str, dict[int, str]]:
    """Returns `shapes` with the places in `replacements` replaced or added."""
    return {tensor: {**shapes.get(tensor, {}), **replacements.get(tensor, {})} for tensor in {**shapes, **replacements}}


def dynamic_sizes(shapes: Shapes, tensors: Mapping[str, Sequence[int]]) -> DynamicSizes:
    """Reads the expressions and checks them against the example inputs."""
    ranges: dict[str, tuple[int, int]] = {}
    by_axis: dict[Axis, Size] = {}
    for tensor, dims in shapes.items():
        for dim, text in dims.items():
            _check_place(tensor, dim, text, tensors)
            if text.strip().isdecimal():
                _check_fixed(f"{tensor}:{dim}", int(text), tensors[tensor][dim])
                continue
            size, given = parse_expression(text)
            if given and ranges.setdefault(size.dimension, given) != given:
                known = ranges[size.dimension]
                raise UsageError(
                    f"`{size.dimension}` is {known[0]} to {known[1]} in one place and {given[0]} to {given[1]} in "
                    f"another ({tensor}:{dim}={text})",
                    hint="A name has the same value everywhere; give its range once.",
                )
            by_axis[tensor, dim] = size
    example: dict[str, int] = {}
    for (tensor, dim), size in by_axis.items():
        if size.dimension not in ranges:
            raise UsageError(
                f"`{size.dimension}` ({tensor}:{dim}) has no range",
                hint=f"Write its range once: {tensor}:{dim}={size}[1:64].",
            )
        _solve(f"{tensor}:{dim}", size, tensors[tensor][dim], ranges[size.dimension], example)
    for (tensor, dim), size in by_axis.items():
        least = ranges[size.dimension][0]
        if (low := size.at({size.dimension: least})) < 0:
            raise UsageError(
                f"{tensor}:{dim} would be {low} if `{size.dimension}` is {least}", hint="A size is at least 0."
            )
    dimensions = tuple(Dimension(name=name, min=low, max=high) for name, (low, high) in ranges.items())
    return DynamicSizes(dimensions, by_axis, example)


def torch_dimensions(sizes: DynamicSizes, state: Iterable[str | None] = ()) -> dict[str, torch.export.Dim]:
    """Returns torch.export's object for every name.

    torch leaves 0 and 1 out while it traces, so that a size from 1 to 2 is 2. Of two such sizes it would not learn that
    they are one, and compiled code would take one of them for 2.
    """
    places = Counter([*(size.dimension for size in sizes.by_axis.values()), *state])
    ends = {d.name: (d.min, max(d.max, 3) if places[d.name] > 1 else d.max) for d in sizes.dimensions}
    return {name: torch.export.Dim(name, min=low, max=high) for name, (low, high) in ends.items()}


def torch_shape(sizes: DynamicSizes, dims: Mapping[str, torch.export.Dim], tensor: str) -> dict[int, object] | None:
    """Returns one tensor's dynamic shape for torch.export."""
    shape: dict[int, object] = {dim: torch.export.Dim.AUTO for name, dim in sizes.free if name == tensor}
    for dim, size in ((dim, size) for (name, dim), size in sizes.by_axis.items() if name == tensor):
        derived = dims[size.dimension]
        # torch.export would treat 1*n and n+0 as different from n.
        derived = size.scale * derived if size.scale != 1 else derived
        shape[dim] = derived + size.offset if size.offset else derived
    return shape or None


class Symbols:
    """Translates a traced program's symbols to the caller's names.

    Args:
        inputs: The name and the symbolic sizes of every tensor input.
        sizes: The caller's names.
        ranges: The program's range constraints, for the other symbols.
        named: Names another symbol by its first place. By default, it keeps its own name.
    """

    def __init__(
        self,
        inputs: Sequence[tuple[str, Sequence[int | torch.SymInt]]],
        sizes: DynamicSizes,
        ranges: Mapping[sympy.Symbol, object],
        named: Callable[[str], str] | None = None,
    ) -> None:
        self._names: dict[sympy.Symbol, sympy.Expr] = {}
        self.dimensions = list(sizes.dimensions)
        places = [((name, dim), size) for name, shape in inputs for dim, size in enumerate(shape)]
        for axis, size in sorted(places, key=lambda each: each[0] not in sizes.by_axis):  # the caller's come first
            if isinstance(size, torch.SymInt) and not size.node.expr.is_Integer:
                self._name(f"{axis[0]}:{axis[1]}", size.node.expr, sizes.at(*axis), ranges, named)

    def size(self, size: int | torch.SymInt) -> int | Size | None:
        """Returns a size for the manifest: a number, a Size of one dimension, or None for anything else."""
        if not isinstance(size, torch.SymInt):
            return int(size)
        expression = sympy.expand(size.node.expr.xreplace(self._names))
        if expression.is_Integer:
            return int(expression)
        linear = linear_in_one(expression)
        if linear is None:
            return None
        symbol, scale, offset = linear
        if scale < 1 or symbol.name not in {d.name for d in self.dimensions}:
            return None
        return Size(dimension=symbol.name, scale=scale, offset=offset)

    def _name(
        self,
        place: str,
        expression: sympy.Expr,
        size: Size | None,
        ranges: Mapping[sympy.Symbol, object],
        named: Callable[[str], str] | None,
    ) -> None:
        linear = linear_in_one(expression)
        if linear is None:
            raise ExportError(
                f"the size of {place} is {expression}, which does not depend on one dimension alone",
                hint="Export the model with sizes such as n, 16*n or 2*n+1.",
            )
        symbol, scale, offset = linear
        if symbol in self._names:
            return
        if size is None:
            interval = ranges[symbol]
            low, high = (getattr(interval, end) for end in ("lower", "upper"))
            high = int(high) if high.is_Integer else MAX_SIZE
            name = named(place) if named else symbol.name
            self.dimensions.append(Dimension(name=name, min=int(low), max=high))
            self._names[symbol] = _integer(name)
        else:
            # The program's symbol may be the whole size while the caller named a part of it, or vice versa.
            self._names[symbol] = (size.scale * _integer(size.dimension) + size.offset - offset) / sympy.Integer(scale)


def _integer(name: str) -> sympy.Symbol:
    return sympy.Symbol(name, integer=True, positive=True)


def expression_of(size: int | torch.SymInt) -> sympy.Expr:
    """Returns a size as an expression."""
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


def linear_in_one(expression: sympy.Expr) -> tuple[sympy.Symbol, int, int] | None:
    """Returns (symbol, scale, offset) of scale * symbol + offset; None for anything else."""
    if len(expression.free_symbols) != 1:
        return None
    (symbol,) = expression.free_symbols
    scale = expression.coeff(symbol, 1)
    offset = expression - scale * symbol
    if not (scale.is_Integer and offset.is_Integer):
        return None
    return symbol, int(scale), int(offset)


def _check_place(tensor: str, dim: int, text: str, tensors: Mapping[str, Sequence[int]]) -> None:
    if tensor not in tensors:
        raise UsageError(
            f"{tensor}:{dim}={text}: the model has no tensor input {tensor!r}",
            hint=f"It has {', '.join(f'{name} {list(shape)}' for name, shape in tensors.items()) or 'none'}.",
        )
    rank = len(tensors[tensor])
    if not 0 <= dim < rank:
        raise UsageError(
            f"{tensor}:{dim}={text}: {tensor} has no dimension {dim}",
            hint=f"The example is {list(tensors[tensor])}: dimensions 0 to {rank - 1}."
            if rank
            else "The example is a single number.",
        )


def _check_fixed(place: str, size: int, actual: int) -> None:
    if size != actual:
        raise UsageError(
            f"{place} is {actual} in the example inputs, and {place}={size} would fix it at another size",
            hint="Give example inputs of that size.",
        )


def _solve(place: str, size: Size, actual: int, ends: tuple[int, int], example: dict[str, int]) -> None:
    """Computes a name's value from the example inputs and checks it."""
    number = size.number_of(actual)
    if number is None:
        raise UsageError(
            f"{place} is {actual} in the example inputs, which is not {size} for any integer",
            hint=f"Give example inputs whose size is, such as {size.scale * (actual // size.scale + 1) + size.offset}.",
        )
    if not ends[0] <= number <= ends[1]:
        raise UsageError(
            f"{place} is {actual} in the example inputs, so `{size.dimension}` is {number}, which is outside "
            f"[{ends[0]}:{ends[1]}]",
            hint="Widen the range, or give example inputs of another size.",
        )
    if actual < 2:
        raise UsageError(
            f"{place} is {actual} in the example inputs, but torch.export treats sizes 0 and 1 as constants",
            hint="Give an example input with a size of at least 2 there. The range may still start at 1.",
        )
    if example.setdefault(size.dimension, number) != number:
        raise UsageError(
            f"`{size.dimension}` is {example[size.dimension]} elsewhere in the example inputs, but {place} = {actual} "
            f"makes it {number}",
            hint="A name has the same value everywhere; use two names, or example inputs that agree.",
        )
