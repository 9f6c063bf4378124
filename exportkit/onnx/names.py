"""Names a converted model's inputs, outputs and dynamic axes as the manifest does."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

import onnx_ir
import sympy
import torch
from onnx_ir.passes.common import NameFixPass
from torch.export.graph_signature import InputKind, TensorArgument

from exportkit.export.models.source_lines import where_listed
from exportkit.export.sizes.shapes import linear_in_one
from exportkit.onnx.interface import Interface
from exportkit.package.manifest import Call, Size, StateTensor, TensorInput, TensorOutput

_Tensor = TensorInput | TensorOutput | StateTensor

RANGES_KEY = "exportkit.dimensions"
"""The key of the ranges in the model's metadata: JSON such as {"batch": [1, 64]}."""


def describe(model: onnx_ir.Model, program: torch.export.ExportedProgram, interface: Interface, call: Call) -> None:
    """Gives a model the manifest's names of inputs, outputs and sizes, and the ranges of the sizes."""
    known = _dimensions(program, [tensor for _, tensor in interface.inputs])
    for value in {value for node in model.graph.all_nodes() for value in node.outputs}:
        _rename_sizes(value, known)
    described: tuple[tuple[onnx_ir.Value, tuple[str, _Tensor]], ...] = (
        *zip(model.graph.inputs, interface.inputs),
        *zip(model.graph.outputs, interface.outputs),
    )
    for value, (_, tensor) in described:
        _rename_sizes(value, known)
        value.shape = onnx_ir.Shape(
            [traced if size is None else _axis(size) for size, traced in zip(tensor.shape, value.shape or ())]
        )
    for value, (name, _) in reversed(described):
        value.name = name
    NameFixPass()(model)
    model.metadata_props[RANGES_KEY] = json.dumps({d.name: [d.min, d.max] for d in call.dimensions})


def _axis(size: int | Size) -> int | str:
    return size if isinstance(size, int) else str(size)


def _dimensions(program: torch.export.ExportedProgram, inputs: Sequence[_Tensor]) -> dict[str, str]:
    """Returns the text of each of the program's symbols in the manifest's dimensions."""
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    taken = [
        values[spec.arg.name]
        for spec in program.graph_signature.input_specs
        if spec.kind is InputKind.USER_INPUT and isinstance(spec.arg, TensorArgument)
    ]
    known: dict[str, str] = {}
    for tensor, described in zip(taken, inputs):
        for traced, size in zip(tensor.shape, described.shape):
            if isinstance(traced, torch.SymInt) and isinstance(size, Size):
                known |= _solved(traced.node.expr, size)
    return known


def _solved(expression: sympy.Expr, size: Size) -> dict[str, str]:
    """Returns the text of an expression's only symbol, such as {"s7": "gh"} if 16 * s7 is 16 * gh."""
    linear = linear_in_one(expression)
    if linear is None:
        return {}
    symbol, scale, offset = linear
    dimension = sympy.Symbol(size.dimension)
    solution = (size.scale * dimension + size.offset - offset) / sympy.Integer(scale)
    return {symbol.name: str(solution) if solution == dimension else f"({solution})"}


def _rename_sizes(value: onnx_ir.Value, known: Mapping[str, str]) -> None:
    if value.shape is None or value.shape.frozen:
        return
    for axis, size in enumerate(value.shape):
        if isinstance(size, onnx_ir.SymbolicDim) and size.value is not None:
            value.shape[axis] = re.sub(r"\b[A-Za-z_]\w*\b", lambda m: known.get(m[0], m[0]), str(size.value))


def cleaned(model: onnx_ir.Model) -> dict[str, str]:
    """Removes what torch.onnx notes of the traced model, which has paths of this machine.

    Returns the line of the model that each node comes from, by the node's name.
    """
    lines = {}
    for node in model.graph.all_nodes():
        line = where_listed(node.metadata_props.get("pkg.torch.onnx.stack_trace", ""))
        if node.name and line:
            lines[node.name] = line
        node.metadata_props.clear()
        node.doc_string = None
        for value in node.outputs:
            value.metadata_props.clear()
    values: Sequence[onnx_ir.Value] = [*model.graph.inputs, *model.graph.initializers.values()]
    for value in values:
        value.metadata_props.clear()
    model.graph.metadata_props.clear()
    model.metadata_props.clear()
    return lines
