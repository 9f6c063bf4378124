"""Lets torch infer the sizes that are declared as Dim.AUTO or Dim.DYNAMIC, and names them."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from exportkit.errors import ExportError
from exportkit.export.sizes.shapes import (
    MAX_SIZE,
    Axis,
    DynamicSizes,
    Shapes,
    Symbols,
    dynamic_sizes,
    merge_shapes,
    with_ranges,
)
from exportkit.export.sizes.size_changes import sizes_as_texts
from exportkit.export.sizes.torch_sizes import INFERRED, VARYING
from exportkit.export.trace.describe_program import taken_tensors
from exportkit.export.trace.explain import explain_refusal
from exportkit.export.trace.judged_sizes import export_judged
from exportkit.export.trace.size_search import sizes_that_trace
from exportkit.export.trace.torch_export import (
    RefusedByTorchError,
    TracingTask,
    call_export,
)
from exportkit.package.manifest import Size

_TRIES = 5
_MARK = re.compile(rf"(?P<sign>[{INFERRED}{VARYING}])(?:\[(?P<min>\d+):(?P<max>\d+)\])?")


def with_inferred(task: TracingTask, shapes: Shapes, ranges: Mapping[str, tuple[int, int]]) -> Shapes:
    """Returns the sizes with a name, or nothing, for each that torch is to infer.

    A name is that of a declared size which it follows, or is made of the axis: `x_0` of x:0.
    """
    marks = {(t, d): m for t, dims in shapes.items() for d, text in dims.items() if (m := _MARK.fullmatch(text))}
    if not marks:
        return shapes
    named_shapes = {t: {d: text for d, text in dims.items() if (t, d) not in marks} for t, dims in shapes.items()}
    known = dynamic_sizes(named_shapes, task.examples)
    varying = [(t, d) for t, d in marks if t in task.examples and d < len(task.examples[t])]
    if len(varying) < len(marks):
        missing = next(axis for axis in marks if axis not in varying)
        dynamic_sizes({missing[0]: {missing[1]: "n[1:2]"}}, task.examples)  # says what there is instead
    varying += known.by_axis
    try:
        program, _ = call_export(torch.export.export, task, DynamicSizes(free=varying))
    except RefusedByTorchError as refused:
        raise explain_refusal(refused, task) from refused.error
    inputs = dict(zip(task.bound.names, taken_tensors(program)))

    def named(place: str) -> str:
        name = re.sub(r"\W", "_", place)
        while name in known.example:
            name += "_"
        return name

    shapes_of = [(name, tuple(tensor.shape)) for name, tensor in inputs.items()]
    symbols = Symbols(shapes_of, known, program.range_constraints, named)
    inferred = merge_shapes(named_shapes, _texts(symbols, known, inputs, marks))
    return _narrowed(task, with_ranges(inferred, ranges), set(known.example))


def _narrowed(task: TracingTask, shapes: Shapes, declared: set[str]) -> Shapes:
    """Returns the sizes with which torch.export takes the model, where it takes fewer of the inferred ones."""
    sizes = dynamic_sizes(shapes, task.examples)
    try:
        export_judged(task, sizes)
    except RefusedByTorchError as refused:
        found = sizes_that_trace(task, refused, _TRIES) if set(refused.names) - declared else None
        if found and all(d in found.dimensions for d in sizes.dimensions if d.name in declared):
            return sizes_as_texts(found)
    return shapes


def _texts(
    symbols: Symbols, known: DynamicSizes, inputs: Mapping[str, torch.Tensor], marks: Mapping[Axis, re.Match[str]]
) -> Shapes:
    """Returns the marked sizes that vary as expressions, with the ranges that their marks leave them."""
    sizes: dict[Axis, Size] = {}
    ends: dict[str, tuple[int, int]] = {}
    for axis, mark in marks.items():
        where, size = f"{axis[0]}:{axis[1]}", symbols.size(inputs[axis[0]].shape[axis[1]])
        if size is None:
            raise ExportError(f"{where} follows another size, and is no whole number for each of it")
        if isinstance(size, int):
            if mark["sign"] == VARYING:
                raise ExportError(
                    f"{where} was declared Dim.DYNAMIC, and is always {size} for this model and example",
                    hint="Declare it Dim.AUTO or leave it out, or give an example of other sizes, of 2 and more.",
                )
            continue
        sizes[axis] = size
        if size.dimension not in known.example:
            low, high = (int(mark["min"]), int(mark["max"])) if mark["min"] else (1, MAX_SIZE)
            low, high = -((size.offset - max(low, 1)) // size.scale), (high - size.offset) // size.scale
            least, most = ends.get(size.dimension, (0, MAX_SIZE))
            ends[size.dimension] = (max(low, least), min(high, most))
    texts: dict[str, dict[int, str]] = {}
    for (tensor, dim), size in sizes.items():
        low, high = ends.get(size.dimension, (0, 0))
        if size.dimension in known.example:
            texts.setdefault(tensor, {})[dim] = str(size)
        elif low < high:  # else one size is allowed, that of the example
            texts.setdefault(tensor, {})[dim] = f"{size}[{low}:{high}]"
    return texts
