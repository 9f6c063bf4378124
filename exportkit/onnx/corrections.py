"""ONNX for operators of torch that torch.onnx 2.13 and onnxscript 0.7.2 translate to something else than torch has.

Beside each stands what is wrong where, with a link. tests/onnx/test_corrections.py fails as soon as one is not needed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx_ir
import torch
from onnxscript import opset18
from onnxscript.function_libs.torch_lib.ops import nn

_OP: Any = opset18  # its types know less than torch.onnx's recorder does
_ATEN = torch.ops.aten
_TYPES = onnx_ir.DataType
_SMALL = (_TYPES.BOOL, _TYPES.INT8, _TYPES.UINT8, _TYPES.INT16, _TYPES.UINT16, _TYPES.INT32)
_LONGEST = 64  # the factors of a product that are multiplied one by one


class NotTranslatedError(Exception):
    """An operator that cannot be translated rightly. The message says why."""


# --- quotients --------------------------------------------------------------------------------------------------------
# onnxscript divides integers in float32, which it mended for `floor_divide` only:
# https://github.com/microsoft/onnxscript/issues/2589
# It floors the rounded quotient of floats, which is one too many for 1 // 0.1, and computes the remainder from that:
# https://github.com/microsoft/onnxscript/issues/989


def _div_mode(self: Any, other: Any, rounding_mode: str | None = None) -> Any:
    self, other = _pair(self, other)
    if rounding_mode is None:
        return _OP.Div(self, other)
    if rounding_mode == "floor":
        return _floor_divide(self, other)
    if not self.dtype.is_floating_point():
        return _narrow(_OP.Div(_wide(self), _wide(other)), self.dtype)
    quotient = _OP.Div(self, other)
    return _OP.Where(_OP.Less(quotient, _number(0, self.dtype)), _OP.Ceil(quotient), _OP.Floor(quotient))


def _floor_divide(self: Any, other: Any) -> Any:
    """The quotient of what the remainder leaves, as torch has it: 1 // 0.1 is 9."""
    self, other = _pair(self, other)
    dtype = self.dtype
    if not dtype.is_floating_point():
        a, b = _wide(self), _wide(other)
        quotient = _OP.Div(a, b)
        rest = _OP.Sub(a, _OP.Mul(quotient, b))
        return _narrow(_OP.Sub(quotient, _OP.Cast(_opposite(rest, b), to=a.dtype)), dtype)
    a, b = _wide(self), _wide(other)
    zero, one, half = (_number(x, a.dtype) for x in (0, 1, 0.5))
    rest = _OP.Mod(a, b, fmod=1)
    quotient = _OP.Div(_OP.Sub(a, rest), b)
    quotient = _OP.Where(_opposite(rest, b), _OP.Sub(quotient, one), quotient)
    floor = _OP.Floor(quotient)
    rounded = _OP.Where(_OP.Greater(_OP.Sub(quotient, floor), half), _OP.Add(floor, one), floor)
    return _narrow(_OP.Where(_OP.Equal(b, zero), _OP.Div(a, b), rounded), dtype)


def _remainder(self: Any, other: Any) -> Any:
    self, other = _pair(self, other)
    if not self.dtype.is_floating_point():
        return _narrow(_OP.Mod(_wide(self), _wide(other)), self.dtype)
    a, b = _wide(self), _wide(other)
    rest = _OP.Mod(a, b, fmod=1)
    return _narrow(_OP.Where(_opposite(rest, b), _OP.Add(rest, b), rest), self.dtype)


def _opposite(rest: Any, divisor: Any) -> Any:
    """Where a remainder is not 0 and has another sign than the divisor."""
    zero = _number(0, divisor.dtype)
    signs = _OP.Xor(_OP.Less(rest, zero), _OP.Less(divisor, zero))
    return _OP.And(_OP.Not(_OP.Equal(rest, zero)), signs)


# --- sums and products ------------------------------------------------------------------------------------------------
# ONNX Runtime adds and multiplies int64 in float64. Nobody asked for exact sums; the change that chose float64 is
# https://github.com/microsoft/onnxruntime/pull/28743.


def _sum(self: Any, dtype: int = -1) -> Any:
    return _sum_of(self, None, False, dtype)


def _sum_of(self: Any, dim: Sequence[int] | int | None = None, keepdim: bool = False, dtype: int = -1) -> Any:
    """sum.dim_IntList: integers exactly."""
    rank = len(self.shape)
    chosen = [dim] if isinstance(dim, int) else list(dim or range(rank))
    axes = sorted(axis % rank for axis in chosen) if rank else []
    wanted = self.dtype if dtype in (-1, None) else onnx_ir.DataType(dtype)
    given = _cast(self, _TYPES.INT64 if wanted.is_integer() else wanted)
    if not rank:
        return _cast(_OP.Identity(given), wanted)
    along, keep = _OP.Constant(value_ints=axes), int(keepdim)
    if given.dtype != _TYPES.INT64 or _is_small(self):
        return _narrow(_OP.ReduceSum(given, along, keepdims=keep), wanted)
    base = _number(2**32, _TYPES.INT64)
    high = _OP.Div(given, base)
    low = _OP.Sub(given, _OP.Mul(high, base))
    high, low = (_OP.ReduceSum(part, along, keepdims=keep) for part in (high, low))
    return _narrow(_OP.Add(_OP.Mul(high, base), low), wanted)


def _is_small(value: Any) -> bool:
    """Whether float64 has room for sums of these numbers, because they were made of smaller dtypes."""
    cast = value.producer()
    source = cast.inputs[0] if cast is not None and cast.op_type == "Cast" else value
    return source.dtype in _SMALL


def _prod(self: Any, dtype: int = -1) -> Any:
    flat = _typed(_OP.Reshape(self, _OP.Constant(value_ints=[-1])), self.dtype)
    sizes = list(self.shape)
    flat.shape = onnx_ir.Shape([math.prod(sizes) if all(isinstance(size, int) for size in sizes) else None])
    return _prod_of(flat, 0, dtype=dtype)


def _prod_of(self: Any, dim: int, keepdim: bool = False, dtype: int = -1) -> Any:
    """prod.dim_int: integers exactly."""
    given = self if dtype in (-1, None) else _cast(self, onnx_ir.DataType(dtype))
    if not len(self.shape):
        return _OP.Identity(given)
    if given.dtype.is_floating_point():
        return _OP.ReduceProd(given, _OP.Constant(value_ints=[dim]), keepdims=int(keepdim))
    size = self.shape[dim]
    return _product(given, dim, size if isinstance(size, int) else None, keepdim)


def _product(given: Any, axis: int, size: int | None, keepdim: bool) -> Any:
    if size is None or not 0 < size <= _LONGEST:
        count = "a number that varies" if size is None else f"{size}"
        raise NotTranslatedError(
            f"ONNX Runtime multiplies integers in float64, which is exact up to 2**53 only; here are {count} of them, "
            f"and 1 to {_LONGEST} can be multiplied one by one"
        )
    wide = _wide(given)
    places = (_OP.Constant(value_ints=[i]) if keepdim else _OP.Constant(value_int=i) for i in range(size))
    factors = (_OP.Gather(wide, place, axis=axis) for place in places)
    return _narrow(functools.reduce(_OP.Mul, factors), given.dtype)


# --- positions --------------------------------------------------------------------------------------------------------


def _scatter_reduce(self: Any, dim: int, index: Any, src: Any, reduce: str, include_self: bool = True) -> Any:
    """scatter_reduce.two: the mean too, and extremes of infinities without the values that were there.

    ONNX has no mean (https://github.com/onnx/onnx/issues/5100), and onnxscript keeps one of the values instead. Without
    `include_self` it begins with the greatest finite number (https://github.com/microsoft/onnxscript/pull/2090).
    """
    if not len(self.shape):
        raise NotTranslatedError("ONNX does not scatter into a tensor without dimensions")
    kinds = {"sum": "add", "prod": "mul", "amax": "max", "amin": "min", "mean": "add"}
    target = self
    if not include_self:
        least, greatest = _ends(self.dtype)
        start = {"sum": 0, "mean": 0, "prod": 1, "amax": least, "amin": greatest}[reduce]
        target = _scattered(self, index, _filled(src, start), dim, "none")
    if reduce in ("amax", "amin") and self.dtype.is_floating_point():
        return _extreme_with_nan(target, index, src, dim, kinds[reduce])
    total = _scattered(target, index, src, dim, kinds[reduce])
    if reduce != "mean":
        return total
    ones = _filled(self, 1)
    if not include_self:
        ones = _scattered(ones, index, _filled(src, 0), dim, "none")
    count = _scattered(ones, index, _filled(src, 1), dim, "add")
    if self.dtype.is_floating_point():
        return _OP.Div(total, count)
    return _floor_divide(total, count)


def _extreme_with_nan(target: Any, index: Any, src: Any, dim: int, kind: str) -> Any:
    """Extremes with NaN, which ONNX Runtime keeps by its position only.

    No issue says so: https://github.com/microsoft/onnxruntime/blob/main/onnxruntime/core/providers/cpu/tensor/scatter.cc
    (`Func_Max`).
    """
    extreme = _scattered(target, index, src, dim, kind)
    flags = [_OP.Cast(_OP.IsNaN(some), to=_TYPES.INT32) for some in (target, src)]
    nan = _OP.ScatterElements(flags[0], index, flags[1], axis=dim, reduction="max")
    return _OP.Where(_OP.Cast(nan, to=_TYPES.BOOL), _number(math.nan, target.dtype), extreme)


def _scattered(target: Any, index: Any, src: Any, dim: int, reduction: str) -> Any:
    return _OP.ScatterElements(target, index, src, axis=dim, reduction=reduction)


def _filled(like: Any, number: float) -> Any:
    return _typed(_OP.Expand(_number(number, like.dtype), _OP.Shape(like)), like.dtype)


def _ends(dtype: onnx_ir.DataType) -> tuple[float, float]:
    if dtype.is_floating_point():
        return -math.inf, math.inf
    if dtype == _TYPES.BOOL:
        return False, True
    return int(dtype.min), int(dtype.max)


def _repeat_interleave(self: Any, repeats: Any, dim: int | None = None, output_size: Any = None) -> Any:
    """repeat_interleave.self_int(Tensor self, SymInt repeats, int? dim, *, SymInt? output_size).

    Where `repeats` is a size, onnxscript repeats along another axis: https://github.com/microsoft/onnxscript/pull/2548
    has one 1 too few before it.
    """
    given = _OP.Reshape(self, _OP.Constant(value_ints=[-1])) if dim is None else self
    rank = 1 if dim is None else len(self.shape)
    axis = 0 if dim is None else dim % rank
    one = _OP.Constant(value_ints=[1])
    times = _OP.Constant(value_ints=[repeats]) if isinstance(repeats, int) else _OP.Reshape(repeats, one)
    before, after = _OP.Constant(value_ints=[1] * (axis + 1)), [1] * (rank - axis - 1)
    ones = [before, times, *([_OP.Constant(value_ints=after)] if after else [])]
    repeated = _OP.Expand(_OP.Unsqueeze(given, _OP.Constant(value_ints=[axis + 1])), _OP.Concat(*ones, axis=0))
    size = _OP.Mul(_OP.Shape(given, start=axis, end=axis + 1), times)
    shape = _OP.Concat(_OP.Shape(given, start=0, end=axis), size, _OP.Shape(given, start=axis + 1), axis=0)
    return _OP.Reshape(repeated, shape, allowzero=1)


# --- functions of numbers ---------------------------------------------------------------------------------------------


def _atan2(self: Any, other: Any) -> Any:
    """atan2 with signed zeros, infinities and NaN.

    onnxscript makes every NaN 0, and loses the signs of zeros: https://github.com/microsoft/onnxscript/pull/2557, for
    https://github.com/pytorch/pytorch/issues/162570.
    """
    y, x = _wide(self), _wide(other)
    zero, one, pi = (_number(number, y.dtype) for number in (0, 1, math.pi))

    def negative(value: Any) -> Any:  # also -0.0, whose inverse is -inf
        return _OP.Or(_OP.Less(value, zero), _OP.And(_OP.Equal(value, zero), _OP.Less(_OP.Div(one, value), zero)))

    both = _OP.And(_OP.IsInf(y), _OP.IsInf(x))
    a = _OP.Where(both, one, _OP.Abs(y))
    b = _OP.Where(both, one, _OP.Abs(x))
    swap = _OP.Greater(a, b)
    low, high = _OP.Where(swap, b, a), _OP.Where(swap, a, b)
    angle = _OP.Atan(_OP.Where(_OP.Equal(high, zero), zero, _OP.Div(low, high)))
    angle = _OP.Where(swap, _OP.Sub(_number(math.pi / 2, y.dtype), angle), angle)
    angle = _OP.Where(negative(x), _OP.Sub(pi, angle), angle)
    angle = _OP.Where(negative(y), _OP.Neg(angle), angle)
    unknown = _OP.Or(_OP.IsNaN(y), _OP.IsNaN(x))
    return _narrow(_OP.Where(unknown, _number(math.nan, y.dtype), angle), self.dtype)


# --- layers --------------------------------------------------------------------------------------------------------


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """scaled_dot_product_attention: rows that see nothing become 0.

    https://github.com/microsoft/onnxscript/pull/2479 replaces NaN by 0. But a mask of booleans becomes the least finite
    number, so that the mean of all values comes out, and a mask of floats is left as it is.
    """
    options = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    answer = nn.aten_scaled_dot_product_attention(query, key, value, attn_mask, **options)
    if attn_mask is None:
        return answer
    seen = attn_mask
    if attn_mask.dtype != _TYPES.BOOL:
        seen = _OP.Not(_OP.Equal(attn_mask, _number(-math.inf, attn_mask.dtype)))
    flags, last = _OP.Cast(seen, to=_TYPES.INT32), _OP.Constant(value_ints=[-1])
    anything = _OP.Cast(_OP.ReduceMax(flags, last, keepdims=1), to=_TYPES.BOOL)
    return _OP.Where(anything, answer, _number(0, query.dtype))


def _group_norm(
    input: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, cudnn_enabled: bool = True
) -> Any:
    """group_norm, also of an empty batch, whose size onnxscript cannot infer.

    https://github.com/microsoft/onnxscript/pull/1750 says that it does not.
    """
    shape, groups = _OP.Shape(input), _OP.Constant(value_ints=[num_groups])
    batch = _OP.Shape(input, start=0, end=1)
    size = _OP.Div(_OP.ReduceProd(_OP.Shape(input, start=1), keepdims=1), groups)
    grouped = _OP.Reshape(input, _OP.Concat(batch, groups, size, axis=0), allowzero=1)
    scale, shift = (_OP.Expand(_number(number, input.dtype), groups) for number in (1, 0))
    normal = _OP.Reshape(_OP.InstanceNormalization(grouped, scale, shift, epsilon=eps), shape, allowzero=1)
    axes = _OP.Constant(value_ints=list(range(1, len(input.shape) - 1)))
    if weight is not None:
        normal = _OP.Mul(normal, _OP.Unsqueeze(weight, axes) if len(input.shape) > 2 else weight)
    if bias is not None:
        normal = _OP.Add(normal, _OP.Unsqueeze(bias, axes) if len(input.shape) > 2 else bias)
    return normal


# --- dtypes -----------------------------------------------------------------------------------------------------------


def _pair(self: Any, other: Any) -> tuple[Any, Any]:
    if isinstance(other, (bool, int, float)):
        return self, _number(other, self.dtype)
    if isinstance(self, (bool, int, float)):
        return _number(self, other.dtype), other
    return self, other


def _number(number: float, dtype: onnx_ir.DataType) -> Any:
    return _typed(_OP.Constant(value=onnx_ir.tensor(number, dtype=dtype)), dtype)


def _wide(value: Any) -> Any:
    """Casts to a dtype for which ONNX Runtime has every kernel."""
    dtype = value.dtype
    wide = _TYPES.FLOAT if dtype.is_floating_point() else _TYPES.INT64
    return _cast(value, dtype if dtype in (_TYPES.DOUBLE, _TYPES.INT32) else wide)


def _narrow(value: Any, dtype: onnx_ir.DataType) -> Any:
    """Casts a result to the dtype that torch returns. ONNX Runtime leaves out a cast that changes nothing."""
    return _OP.Cast(value, to=dtype)


def _cast(value: Any, dtype: onnx_ir.DataType) -> Any:
    return value if value.dtype == dtype else _typed(_OP.Cast(value, to=dtype), dtype)


def _typed(value: Any, dtype: onnx_ir.DataType) -> Any:
    """Notes a dtype that torch.onnx infers only after the translation."""
    value.dtype = dtype
    return value


CORRECTIONS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    _ATEN.div.Tensor_mode: _div_mode,
    _ATEN.floor_divide.default: _floor_divide,
    _ATEN.remainder.Tensor: _remainder,
    _ATEN.remainder.Scalar: _remainder,
    _ATEN.remainder.Scalar_Tensor: _remainder,
    _ATEN.sum.default: _sum,
    _ATEN.sum.dim_IntList: _sum_of,
    _ATEN.prod.default: _prod,
    _ATEN.prod.dim_int: _prod_of,
    _ATEN.scatter_reduce.two: _scatter_reduce,
    _ATEN.repeat_interleave.self_int: _repeat_interleave,
    _ATEN.atan2.default: _atan2,
    _ATEN.group_norm.default: _group_norm,
    _ATEN.scaled_dot_product_attention.default: _attention,
}
"""Translations by operator, for torch.onnx's `custom_translation_table`."""
