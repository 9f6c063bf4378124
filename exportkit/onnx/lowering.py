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
from onnxscript import evaluator

from exportkit.onnx.corrections import CORRECTIONS
from exportkit.onnx.nodes import OP, TYPES, cast, ints, scalar
from exportkit.onnx.placeholders import PLACEHOLDER, CustomCall
from exportkit.onnx.recurrent import recurrent_translations

_ATEN = torch.ops.aten


def _silu_backward(grad_output: Any, self: Any) -> Any:
    """silu_backward: x sigmoid(x), differentiated."""
    gate, one = OP.Sigmoid(self), scalar(1.0, self.dtype)
    return OP.Mul(grad_output, OP.Mul(gate, OP.Add(one, OP.Mul(self, OP.Sub(one, gate)))))


def _mish_backward(grad_output: Any, self: Any) -> Any:
    """mish_backward: x tanh(softplus(x)), differentiated."""
    gate, one = OP.Tanh(OP.Softplus(self)), scalar(1.0, self.dtype)
    inner = OP.Mul(OP.Mul(self, OP.Sigmoid(self)), OP.Sub(one, OP.Mul(gate, gate)))
    return OP.Mul(grad_output, OP.Add(gate, inner))


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
    spread = OP.ConvTranspose(grad_output, weight, strides=steps, dilations=apart, group=groups)
    # Rows at the end that no window reaches, because of the stride, have the gradient 0.
    rest = [0] * (dims + 2) * 2
    rest[-dims:] = [step - 1 for step in steps]
    padded = OP.Pad(spread, OP.Constant(value_ints=rest))
    first = OP.Constant(value_ints=before)
    last = OP.Add(first, OP.Shape(input, start=2))
    # Nobody asks for the other two.
    return (
        OP.Slice(padded, first, last, ints(*range(2, dims + 2))),
        OP.Identity(weight),
        OP.Identity(weight),
    )


BACKWARD: Mapping[Callable[..., Any], Callable[..., Any]] = {
    _ATEN.silu_backward.default: _silu_backward,
    _ATEN.mish_backward.default: _mish_backward,
    _ATEN.convolution_backward.default: _convolution_backward,
}


PLACEHOLDER_DOMAIN = "exportkit.placeholder"
"""The domain of the nodes that `convert` turns into calls of functions."""

_COMPARABLE = (TYPES.FLOAT, TYPES.DOUBLE, TYPES.INT64)  # what TopK, ReduceMax and ArgMax have kernels for


def translations(calls: Mapping[str, CustomCall]) -> Mapping[Callable[..., Any], Callable[..., Any]]:
    """Returns torch.onnx's `custom_translation_table`. Placeholders are for these calls, by key."""

    def placeholder(tensors: Sequence[Any], sizes: Sequence[Any], key: str) -> list[Any]:
        call = calls[key]
        # torch.onnx promotes the dtype of some results, such as amax of float16.
        given = [cast(tensor, onnx_dtype(wanted)) for tensor, wanted in zip(tensors, call.tensors)]
        inputs = [*given, *(OP.Constant(value_int=size) if isinstance(size, int) else size for size in sizes)]
        node = onnx_ir.Node(PLACEHOLDER_DOMAIN, key, inputs, num_outputs=len(call.results), version=1)
        recorder: Any = evaluator.default()
        recorder.nodes.append(node)
        return list(node.outputs)

    return {PLACEHOLDER: placeholder, **_OPERATORS, **BACKWARD, **CORRECTIONS, **recurrent_translations()}


# --- bounds -----------------------------------------------------------------------------------------------------------


def _clamp(self: Any, min: Any = None, max: Any = None) -> Any:
    """clamp(Tensor self, Scalar? min, Scalar? max), and with tensors, which bounds of another dtype become before."""
    low, high = (scalar(b, self.dtype) if isinstance(b, (int, float)) else b for b in (min, max))
    raised = self if low is None else OP.Max(self, low)
    return raised if high is None else OP.Min(raised, high)


def _clamp_max(self: Any, max: Any) -> Any:
    return _clamp(self, None, max)


# --- extremes ---------------------------------------------------------------------------------------------------------


def _extremes(greatest: bool) -> tuple[Callable[..., Any], ...]:
    """Returns amax(dim, keepdim), max(), max(dim, keepdim) and argmax(dim, keepdim), or those of the least."""
    reduce, index_of = (OP.ReduceMax, OP.ArgMax) if greatest else (OP.ReduceMin, OP.ArgMin)
    worst = float("-inf") if greatest else float("inf")

    def over(self: Any, dim: Sequence[int] = (), keepdim: bool = False) -> Any:
        comparable, _ = _comparable(self)
        axes = ints(*dim) if dim else None
        found = cast(reduce(comparable, axes, keepdims=int(keepdim)), self.dtype)
        if not self.dtype.is_floating_point():
            return found
        nan = OP.Cast(OP.IsNaN(comparable), to=TYPES.INT32)
        any_nan = OP.Cast(OP.ReduceMax(nan, axes, keepdims=int(keepdim)), to=TYPES.BOOL)
        return OP.Where(any_nan, scalar(float("nan"), self.dtype), found)

    def over_all(self: Any) -> Any:
        return over(self)

    def index(self: Any, dim: int | None = None, keepdim: bool = False) -> Any:
        rank = len(self.shape)
        if rank == 0:
            return OP.Constant(value_int=0)
        comparable, dtype = _comparable(self)
        if dim is not None:
            return first(comparable, dtype, dim, keepdim)
        flat = first(OP.Reshape(comparable, ints(-1)), dtype, 0, False)
        return OP.Reshape(flat, OP.Constant(value_ints=[1] * rank)) if keepdim else flat

    def first(comparable: Any, dtype: onnx_ir.DataType, dim: int, keepdim: bool) -> Any:
        """Returns the indices of the first extremes along a dimension, or of the first NaN."""
        how = {"axis": dim, "keepdims": int(keepdim)}
        if not dtype.is_floating_point():
            return index_of(comparable, **how)
        is_nan = OP.IsNaN(comparable)
        nan = OP.Cast(is_nan, to=TYPES.INT32)
        any_nan = OP.ReduceMax(nan, ints(dim), keepdims=int(keepdim))
        numbers = OP.Where(is_nan, scalar(worst, dtype), comparable)
        return OP.Where(OP.Cast(any_nan, to=TYPES.BOOL), OP.ArgMax(nan, **how), index_of(numbers, **how))

    def along(self: Any, dim: int, keepdim: bool = False) -> tuple[Any, Any]:
        if len(self.shape) == 0:
            return OP.Identity(self), OP.Constant(value_int=0)
        kept = index(self, dim, True)
        values, indices = OP.GatherElements(self, kept, axis=dim), kept
        if keepdim:
            return values, indices
        axis = ints(dim)
        return OP.Squeeze(values, axis), OP.Squeeze(indices, axis)

    return over, over_all, along, index


# --- order ------------------------------------------------------------------------------------------------------------


def _stable_sort(self: Any, *, stable: bool | None = None, dim: int = -1, descending: bool = False) -> tuple[Any, Any]:
    """sort.stable: equal elements keep their order; NaN is the greatest."""
    return _sort(self, dim, descending)


def _sort(self: Any, dim: int = -1, descending: bool = False) -> tuple[Any, Any]:
    if len(self.shape) == 0:
        return OP.Identity(self), OP.Constant(value_int=0)
    axis = dim % len(self.shape)
    return _ordered(self, OP.Shape(self, start=axis, end=axis + 1), axis, descending)


def _topk(self: Any, k: Any, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Any, Any]:
    """topk(Tensor self, SymInt k, ...): NaN is the greatest."""
    if len(self.shape) == 0:
        return OP.Identity(self), OP.Constant(value_int=0)
    axis = dim % len(self.shape)
    one = ints(1)
    count = ints(k) if isinstance(k, int) else OP.Reshape(k, one)
    if not self.dtype.is_floating_point():
        return _ordered(self, count, axis, largest)
    every, order = _ordered(self, OP.Shape(self, start=axis, end=axis + 1), axis, largest)
    zero, along = ints(0), ints(axis)
    return OP.Slice(every, zero, count, along), OP.Slice(order, zero, count, along)


def _ordered(self: Any, count: Any, axis: int, descending: bool) -> tuple[Any, Any]:
    """Returns the first elements in order, and their indices. For a dtype with NaN, `count` must be the whole axis."""
    comparable, dtype = _comparable(self)
    how = {"axis": axis, "largest": int(descending), "sorted": 1}
    if not self.dtype.is_floating_point():
        _, order = OP.TopK(comparable, count, **how)
        return OP.GatherElements(self, order, axis=axis), order
    nan = OP.IsNaN(comparable)
    _, by_value = OP.TopK(OP.Where(nan, scalar(0.0, dtype), comparable), count, **how)
    # A second sort, which is stable, puts NaN after the numbers, or before them.
    nan_there = OP.GatherElements(OP.Cast(nan, to=TYPES.INT64), by_value, axis=axis)
    _, by_nan = OP.TopK(nan_there, count, **how)
    order = OP.GatherElements(by_value, by_nan, axis=axis)
    return OP.GatherElements(self, order, axis=axis), order


# --- dtypes -----------------------------------------------------------------------------------------------------------


def _comparable(value: Any) -> tuple[Any, onnx_ir.DataType]:
    """Casts to a dtype that keeps the order and that ONNX Runtime can compare, and returns that dtype too."""
    wide = TYPES.FLOAT if value.dtype.is_floating_point() else TYPES.INT64
    dtype = value.dtype if value.dtype in _COMPARABLE else wide
    return cast(value, dtype), dtype


def onnx_dtype(tensor: torch.Tensor) -> onnx_ir.DataType:
    """Returns ONNX's name of a tensor's dtype."""
    return onnx_ir.tensor_adapters.from_torch_dtype(tensor.dtype)


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
