"""Repairs what onnxscript's optimiser does to constants: fused Clips of one tensor give theirs the same names."""

from __future__ import annotations

import itertools

import onnx_ir


def restore_initializers(graph: onnx_ir.Graph) -> None:
    """Registers constants that nodes take, and that another of the same name replaced, under names of their own."""
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
