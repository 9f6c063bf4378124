"""ONNX for operators of torch that torch.onnx does not translate, or not with torch's rules for NaN, infinity and ties.

ONNX Runtime 1.32 on a CPU:

- `Clip` without an upper end makes the greatest finite number of infinity. No issue says so:
  https://github.com/microsoft/onnxruntime/blob/main/onnxruntime/core/providers/cpu/math/clip.cc
- `ReduceMax`, `ArgMax` and their kin see a NaN only if it is the first element:
  https://github.com/microsoft/onnxruntime/issues/10514
- `TopK` orders equal elements by their index. ONNX Runtime 1.30 did not do so with NaN, and ONNX promises nothing:
  https://github.com/onnx/onnx/issues/4716
- `Max`, `Min` and `Where` keep NaN and infinities.

torch.onnx has no `sort.stable`: https://github.com/microsoft/onnxscript/pull/3053

For operators of backward passes torch has no decomposition. `silu_backward` and `mish_backward` have one, which
run_decompositions does not use: it takes them for composite operators, and a CPU has a kernel of each.

tests/onnx/test_corrections.py fails as soon as a translation is not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx_ir
import onnx_ir.tensor_adapters
import torch
from onnxscript import evaluator, opset18

from exportkit.onnx.corrections import CORRECTIONS
from exportkit.onnx.placeholders import PLACEHOLDER, CustomCall
from exportkit.onnx.recurrent import recurrent_translations

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


PLACEHOLDER_DOMAIN = "exportkit.placeholder"
"""The domain of the nodes that `convert` turns into calls of functions."""

_TYPES = onnx_ir.DataType
_COMPARABLE = (_TYPES.FLOAT, _TYPES.DOUBLE, _TYPES.INT64)  # what TopK, ReduceMax and ArgMax have kernels for


def translations(calls: Mapping[str, CustomCall]) -> Mapping[Callable[..., Any], Callable[..., Any]]:
    """Returns torch.onnx's `custom_translation_table`. Placeholders are for these calls, by key."""

    def placeholder(tensors: Sequence[Any], sizes: Sequence[Any], key: str) -> list[Any]:
        call = calls[key]
        # torch.onnx promotes the dtype of some results, such as amax of float16.
        given = [_cast(tensor, onnx_dtype(wanted)) for tensor, wanted in zip(tensors, call.tensors)]
        inputs = [*given, *(_OP.Constant(value_int=size) if isinstance(size, int) else size for size in sizes)]
        node = onnx_ir.Node(PLACEHOLDER_DOMAIN, key, inputs, num_outputs=len(call.results), version=1)
        recorder: Any = evaluator.default()
        recorder.nodes.append(node)
        return list(node.outputs)

    return {PLACEHOLDER: placeholder, **_OPERATORS, **BACKWARD, **CORRECTIONS, **recurrent_translations()}


# --- bounds -----------------------------------------------------------------------------------------------------------


def _clamp(self: Any, min: Any = None, max: Any = None) -> Any:
    """clamp(Tensor self, Scalar? min, Scalar? max), and with tensors, which bounds of another dtype become before."""
    low, high = (_constant(b, self.dtype) if isinstance(b, (int, float)) else b for b in (min, max))
    raised = self if low is None else _OP.Max(self, low)
    return raised if high is None else _OP.Min(raised, high)


def _clamp_max(self: Any, max: Any) -> Any:
    return _clamp(self, None, max)


def _constant(number: float, dtype: onnx_ir.DataType) -> Any:
    return _OP.Constant(value=onnx_ir.tensor(number, dtype=dtype))


# --- extremes ---------------------------------------------------------------------------------------------------------


def _extremes(greatest: bool) -> tuple[Callable[..., Any], ...]:
    """Returns amax(dim, keepdim), max(), max(dim, keepdim) and argmax(dim, keepdim), or those of the least."""
    reduce, index_of = (_OP.ReduceMax, _OP.ArgMax) if greatest else (_OP.ReduceMin, _OP.ArgMin)
    worst = float("-inf") if greatest else float("inf")

    def over(self: Any, dim: Sequence[int] = (), keepdim: bool = False) -> Any:
        comparable, _ = _comparable(self)
        axes = _OP.Constant(value_ints=list(dim)) if dim else None
        found = _cast(reduce(comparable, axes, keepdims=int(keepdim)), self.dtype)
        if not self.dtype.is_floating_point():
            return found
        nan = _OP.Cast(_OP.IsNaN(comparable), to=_TYPES.INT32)
        any_nan = _OP.Cast(_OP.ReduceMax(nan, axes, keepdims=int(keepdim)), to=_TYPES.BOOL)
        return _OP.Where(any_nan, _constant(float("nan"), self.dtype), found)

    def over_all(self: Any) -> Any:
        return over(self)

    def index(self: Any, dim: int | None = None, keepdim: bool = False) -> Any:
        rank = len(self.shape)
        if rank == 0:
            return _OP.Constant(value_int=0)
        comparable, dtype = _comparable(self)
        if dim is not None:
            return first(comparable, dtype, dim, keepdim)
        flat = first(_OP.Reshape(comparable, _OP.Constant(value_ints=[-1])), dtype, 0, False)
        return _OP.Reshape(flat, _OP.Constant(value_ints=[1] * rank)) if keepdim else flat

    def first(comparable: Any, dtype: onnx_ir.DataType, dim: int, keepdim: bool) -> Any:
        """Returns the indices of the first extremes along a dimension, or of the first NaN."""
        how = {"axis": dim, "keepdims": int(keepdim)}
        if not dtype.is_floating_point():
            return index_of(comparable, **how)
        is_nan = _OP.IsNaN(comparable)
        nan = _OP.Cast(is_nan, to=_TYPES.INT32)
        any_nan = _OP.ReduceMax(nan, _OP.Constant(value_ints=[dim]), keepdims=int(keepdim))
        numbers = _OP.Where(is_nan, _constant(worst, dtype), comparable)
        return _OP.Where(_OP.Cast(any_nan, to=_TYPES.BOOL), _OP.ArgMax(nan, **how), index_of(numbers, **how))

    def along(self: Any, dim: int, keepdim: bool = False) -> tuple[Any, Any]:
        if len(self.shape) == 0:
            return _OP.Identity(self), _OP.Constant(value_int=0)
        kept = index(self, dim, True)
        values, indices = _OP.GatherElements(self, kept, axis=dim), kept
        if keepdim:
            return values, indices
        axis = _OP.Constant(value_ints=[dim])
        return _OP.Squeeze(values, axis), _OP.Squeeze(indices, axis)

    return over, over_all, along, index


# --- order ------------------------------------------------------------------------------------------------------------


def _stable_sort(self: Any, *, stable: bool | None = None, dim: int = -1, descending: bool = False) -> tuple[Any, Any]:
    """sort.stable: equal elements keep their order; NaN is the greatest."""
    return _sort(self, dim, descending)


def _sort(self: Any, dim: int = -1, descending: bool = False) -> tuple[Any, Any]:
    if len(self.shape) == 0:
        return _OP.Identity(self), _OP.Constant(value_int=0)
    axis = dim % len(self.shape)
    return _ordered(self, _OP.Shape(self, start=axis, end=axis + 1), axis, descending)


def _topk(self: Any, k: Any, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Any, Any]:
    """topk(Tensor self, SymInt k, ...): NaN is the greatest."""
    if len(self.shape) == 0:
        return _OP.Identity(self), _OP.Constant(value_int=0)
    axis = dim % len(self.shape)
    one = _OP.Constant(value_ints=[1])
    count = _OP.Constant(value_ints=[k]) if isinstance(k, int) else _OP.Reshape(k, one)
    if not self.dtype.is_floating_point():
        return _ordered(self, count, axis, largest)
    every, order = _ordered(self, _OP.Shape(self, start=axis, end=axis + 1), axis, largest)
    zero, along = _OP.Constant(value_ints=[0]), _OP.Constant(value_ints=[axis])
    return _OP.Slice(every, zero, count, along), _OP.Slice(order, zero, count, along)


def _ordered(self: Any, count: Any, axis: int, descending: bool) -> tuple[Any, Any]:
    """Returns the first elements in order, and their indices. For a dtype with NaN, `count` must be the whole axis."""
    comparable, dtype = _comparable(self)
    how = {"axis": axis, "largest": int(descending), "sorted": 1}
    if not self.dtype.is_floating_point():
        _, order = _OP.TopK(comparable, count, **how)
        return _OP.GatherElements(self, order, axis=axis), order
    nan = _OP.IsNaN(comparable)
    _, by_value = _OP.TopK(_OP.Where(nan, _constant(0.0, dtype), comparable), count, **how)
    # A second sort, which is stable, puts NaN after the numbers, or before them.
    nan_there = _OP.GatherElements(_OP.Cast(nan, to=_TYPES.INT64), by_value, axis=axis)
    _, by_nan = _OP.TopK(nan_there, count, **how)
    order = _OP.GatherElements(by_value, by_nan, axis=axis)
    return _OP.GatherElements(self, order, axis=axis), order


# --- dtypes -----------------------------------------------------------------------------------------------------------


def _comparable(value: Any) -> tuple[Any, onnx_ir.DataType]:
    """Casts to a dtype that keeps the order and that ONNX Runtime can compare, and returns that dtype too."""
    wide = _TYPES.FLOAT if value.dtype.is_floating_point() else _TYPES.INT64
    dtype = value.dtype if value.dtype in _COMPARABLE else wide
    return _cast(value, dtype), dtype


def onnx_dtype(tensor: torch.Tensor) -> onnx_ir.DataType:
    """Returns ONNX's name of a tensor's dtype."""
    return onnx_ir.tensor_adapters.from_torch_dtype(tensor.dtype)


def _cast(value: Any, dtype: onnx_ir.DataType) -> Any:
    return value if value.dtype == dtype else _OP.Cast(value, to=dtype)


_amax, _max, _max_dim, _argmax = _extremes(greatest=True)
_amin, _min, _min_dim, _argmin = _extremes(greatest=False)

_OPERATORS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    _ATEN.clamp.default: _clamp,
    _ATEN.clamp_min.default: _clamp,
    _ATEN.clamp_min.Tensor: _clamp,
    _ATEN.clamp_max.default: _clamp_max,
    _ATEN.clamp_max.Tensor: _clamp_max,
    _ATEN.amax.default: _amax,
    _ATEN.amin.default: _amin,
    _ATEN.max.default: _max,
    _ATEN.min.default: _min,
    _ATEN.max.dim: _max_dim,
    _ATEN.min.dim: _min_dim,
    _ATEN.argmax.default: _argmax,
    _ATEN.argmin.default: _argmin,
    _ATEN.sort.stable: _stable_sort,
    _ATEN.sort.default: _sort,
    _ATEN.topk.default: _topk,
}
