"""ONNX for operators of torch that torch.onnx does not translate, or not with torch's rules for NaN and ties."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import onnx_ir
import torch
from onnxscript import evaluator, opset18

from exportkit.onnx.calls import STAND_IN

STAND_IN_DOMAIN = "exportkit.stand_in"
"""The domain of the nodes that `convert` turns into calls of functions."""


def translations(results_of: Callable[[str], int]) -> Mapping[Callable[..., Any], Callable[..., Any]]:
    """Returns torch.onnx's `custom_translation_table`.

    Args:
        results_of: Gives the number of results of a stand-in's call.
    """

    def stand_in(tensors: list[Any], sizes: list[Any], key: str) -> list[Any]:
        inputs = [*tensors, *(opset18.Constant(value_int=size) if isinstance(size, int) else size for size in sizes)]
        node = onnx_ir.Node(STAND_IN_DOMAIN, key, inputs, num_outputs=results_of(key), version=1)
        recorder: Any = evaluator.default()
        recorder.nodes.append(node)
        return list(node.outputs)

    return {
        STAND_IN: stand_in,
        torch.ops.aten.sort.stable: _sort,
    }


def _sort(self: Any, *, stable: bool | None = None, dim: int = -1, descending: bool = False) -> tuple[Any, Any]:
    """Stable sort with NaN as the greatest. TopK gives equal elements in the order of their indices."""
    op: Any = opset18
    if len(self.shape) == 0:
        return op.Identity(self), op.Constant(value_int=0)
    count = op.Shape(self, start=dim, end=dim + 1 if dim != -1 else None)
    comparable = _comparable(self)
    if not self.dtype.is_floating_point():
        _, order = op.TopK(comparable, count, axis=dim, largest=int(descending), sorted=1)
        return op.GatherElements(self, order, axis=dim), order
    # TopK says nothing about NaN. Numbers are sorted first, and then, stably, NaN after or before them.
    nan = op.IsNaN(comparable)
    _, by_value = op.TopK(
        op.Where(nan, op.CastLike(op.Constant(value_float=0.0), comparable), comparable),
        count,
        axis=dim,
        largest=int(descending),
        sorted=1,
    )
    nan_there = op.GatherElements(op.Cast(nan, to=onnx_ir.DataType.INT32), by_value, axis=dim)
    _, by_nan = op.TopK(nan_there, count, axis=dim, largest=int(descending), sorted=1)
    order = op.GatherElements(by_value, by_nan, axis=dim)
    return op.GatherElements(self, order, axis=dim), order


def _comparable(value: Any) -> Any:
    """Casts to a dtype that ONNX Runtime's TopK has a kernel for, which keeps the order."""
    if value.dtype.is_floating_point():
        wide = value.dtype in (onnx_ir.DataType.FLOAT, onnx_ir.DataType.DOUBLE)
        return value if wide else opset18.Cast(value, to=onnx_ir.DataType.FLOAT)
    return value if value.dtype == onnx_ir.DataType.INT64 else opset18.Cast(value, to=onnx_ir.DataType.INT64)
