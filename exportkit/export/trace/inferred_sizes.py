"""Lets torch infer the sizes that are declared as Dim.AUTO or Dim.DYNAMIC, and names them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import sympy
import torch

from exportkit.errors import ExportError
from exportkit.export.sizes.shapes import (
    MAX_SIZE,
    Axis,
    DynamicSizes,
    Shapes,
    dynamic_sizes,
    expression_of,
    linear_in_one,
    with_ranges,
)
from exportkit.export.sizes.size_changes import sizes_as_texts, violated_names
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

    Args:
        task: The method.
        shapes: The declared sizes.
        ranges: Ranges by name, for names that are given here.

    Raises:
        UsageError: A size that must vary is 0 or 1 in the example, or an expression cannot be read.
        ExportError: torch.export refused the model, or fixes a size that must vary.
    """
    marks = {(t, d): m for t, dims in shapes.items() for d, text in dims.items() if (m := _MARK.fullmatch(text))}
    if not marks:
        return shapes
    named = {t: {d: text for d, text in dims.items() if (t, d) not in marks} for t, dims in shapes.items()}
    known = dynamic_sizes(named, task.examples)
    varying = [(t, d) for t, d in marks if t in task.examples and d < len(task.examples[t])]
    if len(varying) < len(marks):
        missing = next(axis for axis in marks if axis not in varying)
        dynamic_sizes({missing[0]: {missing[1]: "n[1:2]"}}, task.examples)  # says what there is instead
    varying += known.by_axis
    try:
        program, _ = call_export(torch.export.export, task, DynamicSizes(free=varying))
    except RefusedByTorchError as refused:
        raise explain_refusal(refused, task) from refused.error
    found = _Inferred(known)
    values = dict(zip(task.bound.names, taken_tensors(program)))
    for tensor, dim in sorted(varying, key=lambda axis: known.at(*axis) is None):
        found.add((tensor, dim), expression_of(values[tensor].shape[dim]), marks.get((tensor, dim)))
    inferred = {**named, **{t: {**named.get(t, {}), **dims} for t, dims in found.texts().items()}}
    return _narrowed(task, with_ranges(inferred, ranges), set(known.example))


def _narrowed(task: TracingTask, shapes: Shapes, declared: set[str]) -> Shapes:
    """Returns the sizes with which torch.export takes the model, where it takes fewer of the inferred ones."""
    sizes = dynamic_sizes(shapes, task.examples)
    try:
        export_judged(task, sizes)
    except RefusedByTorchError as refused:
        free = [name for name in violated_names(str(refused)) if name not in declared]
        found = sizes_that_trace(task, refused, _TRIES) if free else None
        if found and all(d in found.dimensions for d in sizes.dimensions if d.name in declared):
            return sizes_as_texts(found)
    return shapes


@dataclass
class _Inferred:
    """What torch found of the sizes, in names.

    Attributes:
        known: The declared sizes.
    """

    known: DynamicSizes
    _symbols: dict[sympy.Symbol, sympy.Expr] = field(default_factory=dict)
    _sizes: dict[Axis, Size] = field(default_factory=dict)
    _ends: dict[str, tuple[int, int]] = field(default_factory=dict)

    def add(self, axis: Axis, expression: sympy.Expr, mark: re.Match[str] | None) -> None:
        """Adds an axis, with what torch found; the declared ones first."""
        where = f"{axis[0]}:{axis[1]}"
        if expression.is_Integer:
            if mark and mark["sign"] == VARYING:
                raise ExportError(
                    f"{where} was declared Dim.DYNAMIC, and is always {expression} for this model and example",
                    hint="Declare it Dim.AUTO or leave it out, or give an example of other sizes, of 2 and more.",
                )
            return
        if (linear := linear_in_one(expression)) is None:
            raise ExportError(
                f"the size of {where} is {expression}, which does not depend on one dimension alone",
                hint="Give it a name, such as Dim('n').",
            )
        symbol, scale, offset = linear
        if (size := self.known.at(*axis)) is not None:
            name = sympy.Symbol(size.dimension, integer=True)
            self._symbols.setdefault(symbol, (size.scale * name + size.offset - offset) / sympy.Integer(scale))
            return
        new = symbol not in self._symbols
        if new:
            self._symbols[symbol] = sympy.Symbol(self._name(axis), integer=True)
        in_names = linear_in_one(sympy.expand(expression.xreplace(self._symbols)))
        if in_names is None:
            raise ExportError(f"{where} follows {expression} of another size, which is no whole number for each of it")
        root, scale, offset = in_names
        self._sizes[axis] = Size(dimension=root.name, scale=scale, offset=offset)
        if root.name in self.known.example:
            return
        low, high = (int(mark["min"]), int(mark["max"])) if mark and mark["min"] else (1, MAX_SIZE)
        low, high = -((offset - max(low, 1)) // scale), (high - offset) // scale
        known = self._ends.get(root.name, (0, MAX_SIZE))
        self._ends[root.name] = (max(low, known[0]), min(high, known[1]))

    def _name(self, axis: Axis) -> str:
        name = re.sub(r"\W", "_", f"{axis[0]}_{axis[1]}")
        while name in self.known.example or name in self._ends:
            name += "_"
        return name

    def texts(self) -> dict[str, dict[int, str]]:
        """Returns the sizes as expressions."""
        texts: dict[str, dict[int, str]] = {}
        for (tensor, dim), size in self._sizes.items():
            text = str(size)
            if size.dimension in self._ends:
                low, high = self._ends[size.dimension]
                if low >= high:
                    continue  # one size is allowed, that of the example
                text += f"[{low}:{high}]"
            texts.setdefault(tensor, {})[dim] = text
        return texts
