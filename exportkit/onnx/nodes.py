"""Small nodes of ONNX that translations of torch's operators are made of."""

from __future__ import annotations

from typing import Any

import onnx_ir
from onnxscript import opset18

OP: Any = opset18  # its types know less than torch.onnx's recorder does
TYPES = onnx_ir.DataType


def scalar(value: float, dtype: onnx_ir.DataType) -> Any:
    """Returns a constant without dimensions."""
    return typed(OP.Constant(value=onnx_ir.tensor(value, dtype=dtype)), dtype)


def ints(*values: int) -> Any:
    """Returns a constant of one dimension, such as axes."""
    return OP.Constant(value_ints=list(values))


def cast(value: Any, dtype: onnx_ir.DataType) -> Any:
    """Returns a value in a dtype."""
    return value if value.dtype == dtype else typed(OP.Cast(value, to=dtype), dtype)


def typed(value: Any, dtype: onnx_ir.DataType) -> Any:
    """Notes a dtype that torch.onnx infers only after the translation."""
    value.dtype = dtype
    return value
