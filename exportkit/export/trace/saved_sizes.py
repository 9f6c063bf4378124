"""Reads the sizes of a program of torch.export.save, and gives them names and ranges."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from exportkit.errors import ExportError, UsageError
from exportkit.export.export_options import TraceOptions
from exportkit.export.models.option_parsing import parse_expression, parse_places, parse_ranges
from exportkit.export.record.eager_methods import EagerMethods
from exportkit.export.sizes.shapes import DynamicSizes, Symbols, dynamic_sizes
from exportkit.export.trace.describe_program import taken_tensors
from exportkit.package.manifest import Size
from exportkit.spec import FORWARD, ExportSpec


def shapes_of(program: torch.export.ExportedProgram, spec: ExportSpec) -> dict[str, dict[int, str]]:
    """Returns the sizes of a program's inputs that vary, as `ExportSpec.dynamic_shapes` has them.

    Raises:
        ExportError: A size does not depend on one dimension alone.
    """
    args, kwargs = program.example_inputs
    names = EagerMethods(spec).bind(FORWARD, args, kwargs).names
    shapes = [(name, tuple(value.shape)) for name, value in zip(names, taken_tensors(program))]
    symbols = Symbols(shapes, DynamicSizes(), program.range_constraints)
    found: dict[str, dict[int, str]] = {}
    for name, shape in shapes:
        for axis, size in enumerate(symbols.size(each) for each in shape):
            if size is None:
                raise ExportError(f"{name} was traced as {list(shape)}, where a size depends on several dimensions")
            if isinstance(size, Size):
                (limits,) = (each for each in symbols.dimensions if each.name == size.dimension)
                found.setdefault(name, {})[axis] = f"{size}[{limits.min}:{limits.max}]"
    return found


def named_sizes(program: torch.export.ExportedProgram, spec: ExportSpec, options: TraceOptions) -> DynamicSizes:
    """Returns the sizes of a traced program with the names and ranges that the options give; nothing if they give none.

    torch.export.save keeps no names: a program has `s77` where its author wrote `Dim("batch")`.

    Args:
        program: The program.
        spec: Its module.
        options: `dynamic` names a place that varies, `ranges` narrows a range.

    Raises:
        UsageError: A place does not vary, or varies in another way or within other ends than those given.
    """
    if not (options.dynamic or options.ranges):
        return DynamicSizes()
    shapes = shapes_of(program, spec)
    args, kwargs = program.example_inputs
    bound = EagerMethods(spec).bind(FORWARD, args, kwargs)
    parsed = [parse_expression(text) for dims in shapes.values() for text in dims.values()]
    known = {size.dimension: ends for size, ends in parsed if ends}
    renamed, ranges = _renamed(shapes, options), parse_ranges(options.ranges)
    named: dict[str, dict[int, str]] = {}
    for tensor, dims in shapes.items():
        for dim, text in dims.items():
            size = parse_expression(text)[0]
            name, given = renamed.get(size.dimension, (size.dimension, None))
            least, most = known[size.dimension]
            low, high = ranges.get(name, given or (least, most))
            if low < least or high > most:
                raise UsageError(
                    f"`{name}` would be {low} to {high}, and the program was traced for {least} to {most}",
                    hint="Give a range inside of that one.",
                )
            size = Size(dimension=name, scale=size.scale, offset=size.offset)
            named.setdefault(tensor, {})[dim] = f"{size}[{low}:{high}]"
    sizes = dynamic_sizes(named, {name: tuple(tensor.shape) for name, tensor in zip(bound.names, bound.tensors)})
    if unknown := [name for name in ranges if name not in sizes.example]:
        raise UsageError(
            f"--range {unknown[0]}=...: no size has the name `{unknown[0]}`", hint=f"These vary: {_listed(shapes)}."
        )
    return sizes


def _renamed(
    shapes: Mapping[str, Mapping[int, str]], options: TraceOptions
) -> dict[str, tuple[str, tuple[int, int] | None]]:
    """Returns the new name of each of the program's dimensions that gets one, with its range."""
    renamed = {}
    for tensor, dims in parse_places(options.dynamic).items():
        for dim, text in dims.items():
            if (traced := shapes.get(tensor, {}).get(dim)) is None:
                raise UsageError(
                    f"{tensor}:{dim}={text}: the program was traced with that size fixed",
                    hint=f"These vary: {_listed(shapes)}.",
                )
            was, (size, ends) = parse_expression(traced)[0], parse_expression(text)
            if (size.scale, size.offset) != (was.scale, was.offset):
                raise UsageError(
                    f"{tensor}:{dim}={text}: the program was traced with {was} there",
                    hint=f"Write a name in place of {was.dimension}.",
                )
            renamed[was.dimension] = (size.dimension, ends)
    return renamed


def _listed(shapes: Mapping[str, Mapping[int, str]]) -> str:
    return ", ".join(f"{t}:{d} as {text}" for t, dims in shapes.items() for d, text in dims.items()) or "none"
