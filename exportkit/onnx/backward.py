"""ONNX for operators of backward passes that torch.onnx does not translate, and for which torch has no decomposition.

`silu_backward` and `mish_backward` have one, which run_decompositions does not use: it takes them for composite
operators, and a CPU has a kernel of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx_ir
import torch
from onnxscript import opset18

_OP: Any = opset18  # its types know less than torch.onnx's recorder does
_ATEN = torch.ops.aten


def _silu_backward(grad_output: Any, self: Any) -> Any:
    """silu_backward: x sigmoid(x), differentiated."""
    gate, one = _OP.Sigmoid(self), _one(self.dtype)
    return _OP.Mul(grad_output, _OP.Mul(gate, _OP.Add(one, _OP.Mul(self, _OP.Sub(one, gate)))))


def _mish_backward(grad_output: Any, self: Any) -> Any:
    """mish_backward: x tanh(softplus(x)), differentiated."""
    gate, one = _OP.Tanh(_OP.Softplus(self)), _one(self.dtype)
    inner = _OP.Mul(_OP.Mul(self, _OP.Sigmoid(self)), _OP.Sub(one, _OP.Mul(gate, gate)))
    return _OP.Mul(grad_output, _OP.Add(gate, inner))


def _convolution_backward(
    grad_output: Any,
    input: Any,
    weight: Any,
    bias_sizes: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Any, Any, Any]:
    """convolution_backward for the input: each gradient is spread over the window that it came from."""
    if transposed or list(output_mask) != [True, False, False]:
        # The export catches it, and names the line of the model.
        raise NotImplementedError("convolution_backward of weights, or of a transposed convolution")
    dims = len(input.shape) - 2
    every = [list(given) * (dims if len(given) == 1 else 1) for given in (stride, padding, dilation)]
    steps, before, apart = every
    spread = _OP.ConvTranspose(grad_output, weight, strides=steps, dilations=apart, group=groups)
    # Rows at the end that no window reaches, because of the stride, have the gradient 0.
    rest = [0] * (dims + 2) * 2
    rest[-dims:] = [step - 1 for step in steps]
    padded = _OP.Pad(spread, _OP.Constant(value_ints=rest))
    first = _OP.Constant(value_ints=before)
    last = _OP.Add(first, _OP.Shape(input, start=2))
    # Nobody asks for the other two.
    return (
        _OP.Slice(padded, first, last, _OP.Constant(value_ints=list(range(2, dims + 2)))),
        _OP.Identity(weight),
        _OP.Identity(weight),
    )


def _one(dtype: onnx_ir.DataType) -> Any:
    return _OP.Constant(value=onnx_ir.tensor(1.0, dtype=dtype))


BACKWARD: Mapping[Callable[..., Any], Callable[..., Any]] = {
    _ATEN.silu_backward.default: _silu_backward,
    _ATEN.mish_backward.default: _mish_backward,
    _ATEN.convolution_backward.default: _convolution_backward,
}
