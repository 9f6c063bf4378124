"""Reads the sizes of a program of torch.export.save, and gives them names and ranges."""

from __future__ import annotations

import torch

from exportkit.errors import ExportError, UsageError
from exportkit.export.export_options import TraceOptions
from exportkit.export.models.call_signature import BoundCall
from exportkit.export.models.option_parsing import parse_expression, parse_places, parse_ranges
from exportkit.export.sizes.shapes import Axis, DynamicSizes, Symbols, dynamic_sizes
from exportkit.export.trace.describe_program import taken_tensors
from exportkit.package.manifest import Size


def named_sizes(program: torch.export.ExportedProgram, bound: BoundCall, options: TraceOptions) -> DynamicSizes:
    """Returns the sizes of a traced program, with the names and ranges that the options give.

    torch.export.save keeps no names: a program has `s77` where its author wrote `Dim("batch")`.
    """
    shapes = [(name, tuple(value.shape)) for name, value in zip(bound.names, taken_tensors(program))]
    symbols = Symbols(shapes, DynamicSizes(), program.range_constraints)
    traced: dict[Axis, Size] = {}
    for name, shape in shapes:
        for axis, size in enumerate(map(symbols.size, shape)):
            if size is None:
                raise ExportError(f"{name} was traced as {list(shape)}, where a size depends on several dimensions")
            if isinstance(size, Size):
                traced[name, axis] = size
    known = {each.name: (each.min, each.max) for each in symbols.dimensions}
    vary = ", ".join(
        f"{tensor}:{dim} as {size}[{known[size.dimension][0]}:{known[size.dimension][1]}]"
        for (tensor, dim), size in traced.items()
    )
    renamed = _renamed(traced, options, vary or "none")
    ranges = parse_ranges(options.ranges)
    named: dict[str, dict[int, str]] = {}
    for (tensor, dim), size in traced.items():
        name, given = renamed.get(size.dimension, (size.dimension, None))
        least, most = known[size.dimension]
        low, high = ranges.get(name, given or (least, most))
        if low < least or high > most:
            raise UsageError(
                f"`{name}` would be {low} to {high}, and the program was traced for {least} to {most}",
                hint="Give a range inside of that one.",
            )
        new = Size(dimension=name, scale=size.scale, offset=size.offset)
        named.setdefault(tensor, {})[dim] = f"{new}[{low}:{high}]"
    sizes = dynamic_sizes(named, {name: tuple(tensor.shape) for name, tensor in zip(bound.names, bound.tensors)})
    if unknown := [name for name in ranges if name not in sizes.example]:
        raise UsageError(
            f"--range {unknown[0]}=...: no size has the name `{unknown[0]}`", hint=f"These vary: {vary or 'none'}."
        )
    return sizes


def _renamed(
    traced: dict[Axis, Size], options: TraceOptions, vary: str
) -> dict[str, tuple[str, tuple[int, int] | None]]:
    """Returns the new name of each of the program's dimensions that gets one, with its range."""
    renamed = {}
    for tensor, dims in parse_places(options.dynamic).items():
        for dim, text in dims.items():
            if (was := traced.get((tensor, dim))) is None:
                raise UsageError(
                    f"{tensor}:{dim}={text}: the program was traced with that size fixed", hint=f"These vary: {vary}."
                )
            size, ends = parse_expression(text)
            if (size.scale, size.offset) != (was.scale, was.offset):
                raise UsageError(
                    f"{tensor}:{dim}={text}: the program was traced with {was} there",
                    hint=f"Write a name in place of {was.dimension}.",
                )
            renamed[was.dimension] = (size.dimension, ends)
    return renamed
