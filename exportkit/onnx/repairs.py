"""Repairs converted graphs, whose faults come from onnxscript's optimiser and from ONNX Runtime 1.32.

tests/onnx/test_corrections.py fails as soon as one is not needed.
"""

from __future__ import annotations

import itertools

import onnx_ir

_SCATTERS = ("ScatterElements", "ScatterND")
_HALVES = (onnx_ir.DataType.FLOAT16, onnx_ir.DataType.BFLOAT16)
_WIDE = onnx_ir.DataType.FLOAT


def restore_initializers(graph: onnx_ir.Graph) -> None:
    """Registers constants that nodes take, and that another of the same name replaced, under names of their own.

    onnxscript's optimiser gives the constants of fused Clips of one tensor the same names:
    https://github.com/microsoft/onnxscript/issues/2945.
    """
    for node in list(graph.all_nodes()):
        for value in node.inputs:
            if value is None or value.producer() is not None or value.const_value is None or value.is_graph_input():
                continue
            if graph.initializers.get(value.name or "") is not value:
                value.name = next(
                    name for number in itertools.count() if (name := f"constant_{number}") not in graph.initializers
                )
                value.const_value.name = value.name
                graph.register_initializer(value)


def widen_scatters(graph: onnx_ir.Graph) -> None:
    """Computes the sums and products of scattered float16 and bfloat16 in float32.

    ONNX Runtime loads such a model, and fails when it is called: https://github.com/microsoft/onnxruntime/issues/17653.
    """
    for node in list(graph.all_nodes()):
        combines = node.attributes.get_string("reduction", "none") != "none"
        if node.domain == "" and node.op_type in _SCATTERS and combines:
            data, index, updates = node.inputs
            if data is not None and updates is not None and data.dtype in _HALVES:
                _upcast(node, data, index, updates)


def _upcast(node: onnx_ir.Node, data: onnx_ir.Value, index: onnx_ir.Value | None, updates: onnx_ir.Value) -> None:
    assert node.graph is not None
    wide = [_cast(node, value, _WIDE) for value in (data, updates)]
    scatter = onnx_ir.node(
        node.op_type, [wide[0].outputs[0], index, wide[1].outputs[0]], dict(node.attributes), name=f"{node.name}_wide"
    )
    old = node.outputs[0]
    scatter.outputs[0].dtype, scatter.outputs[0].shape = _WIDE, old.shape
    narrow = _cast(node, scatter.outputs[0], data.dtype)
    narrow.outputs[0].shape = old.shape
    node.graph.insert_before(node, [*wide, scatter, narrow])
    onnx_ir.convenience.replace_all_uses_with(old, narrow.outputs[0], replace_graph_outputs=True)
    narrow.outputs[0].name = old.name
    node.graph.remove(node)


def _cast(node: onnx_ir.Node, value: onnx_ir.Value, dtype: onnx_ir.DataType | None) -> onnx_ir.Node:
    assert dtype is not None
    cast = onnx_ir.node("Cast", [value], {"to": dtype}, name=f"{node.name}_{value.name}_to_{dtype.name.lower()}")
    cast.outputs[0].dtype, cast.outputs[0].shape = dtype, value.shape
    return cast
