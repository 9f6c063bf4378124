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
from onnxscript.function_libs.torch_lib.ops import nn

from exportkit.onnx.nodes import OP, TYPES, cast, ints, scalar, typed

_ATEN = torch.ops.aten
_SMALL = (TYPES.BOOL, TYPES.INT8, TYPES.UINT8, TYPES.INT16, TYPES.UINT16, TYPES.INT32)
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
        return OP.Div(self, other)
    if rounding_mode == "floor":
        return _floor_divide(self, other)
    if not self.dtype.is_floating_point():
        return _narrow(OP.Div(_wide(self), _wide(other)), self.dtype)
    quotient = OP.Div(self, other)
    return OP.Where(OP.Less(quotient, scalar(0, self.dtype)), OP.Ceil(quotient), OP.Floor(quotient))


def _floor_divide(self: Any, other: Any) -> Any:
    """The quotient of what the remainder leaves, as torch has it: 1 // 0.1 is 9."""
    self, other = _pair(self, other)
    dtype = self.dtype
    if not dtype.is_floating_point():
        a, b = _wide(self), _wide(other)
        quotient = OP.Div(a, b)
        rest = OP.Sub(a, OP.Mul(quotient, b))
        return _narrow(OP.Sub(quotient, OP.Cast(_opposite(rest, b), to=a.dtype)), dtype)
    a, b = _wide(self), _wide(other)
    zero, one, half = (scalar(x, a.dtype) for x in (0, 1, 0.5))
    rest = OP.Mod(a, b, fmod=1)
    quotient = OP.Div(OP.Sub(a, rest), b)
    quotient = OP.Where(_opposite(rest, b), OP.Sub(quotient, one), quotient)
    floor = OP.Floor(quotient)
    rounded = OP.Where(OP.Greater(OP.Sub(quotient, floor), half), OP.Add(floor, one), floor)
    return _narrow(OP.Where(OP.Equal(b, zero), OP.Div(a, b), rounded), dtype)


def _remainder(self: Any, other: Any) -> Any:
    self, other = _pair(self, other)
    if not self.dtype.is_floating_point():
        return _narrow(OP.Mod(_wide(self), _wide(other)), self.dtype)
    a, b = _wide(self), _wide(other)
    rest = OP.Mod(a, b, fmod=1)
    return _narrow(OP.Where(_opposite(rest, b), OP.Add(rest, b), rest), self.dtype)


def _opposite(rest: Any, divisor: Any) -> Any:
    """Where a remainder is not 0 and has another sign than the divisor."""
    zero = scalar(0, divisor.dtype)
    signs = OP.Xor(OP.Less(rest, zero), OP.Less(divisor, zero))
    return OP.And(OP.Not(OP.Equal(rest, zero)), signs)


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
    given = cast(self, TYPES.INT64 if wanted.is_integer() else wanted)
    if not rank:
        return cast(OP.Identity(given), wanted)
    along, keep = OP.Constant(value_ints=axes), int(keepdim)
    if given.dtype != TYPES.INT64 or _is_small(self):
        return _narrow(OP.ReduceSum(given, along, keepdims=keep), wanted)
    base = scalar(2**32, TYPES.INT64)
    high = OP.Div(given, base)
    low = OP.Sub(given, OP.Mul(high, base))
    high, low = (OP.ReduceSum(part, along, keepdims=keep) for part in (high, low))
    return _narrow(OP.Add(OP.Mul(high, base), low), wanted)


def _is_small(value: Any) -> bool:
    """Whether float64 has room for sums of these numbers, because they were made of smaller dtypes."""
    cast = value.producer()
    source = cast.inputs[0] if cast is not None and cast.op_type == "Cast" else value
    return source.dtype in _SMALL


def _prod(self: Any, dtype: int = -1) -> Any:
    flat = typed(OP.Reshape(self, ints(-1)), self.dtype)
    sizes = list(self.shape)
    flat.shape = onnx_ir.Shape([math.prod(sizes) if all(isinstance(size, int) for size in sizes) else None])
    return _prod_of(flat, 0, dtype=dtype)


def _prod_of(self: Any, dim: int, keepdim: bool = False, dtype: int = -1) -> Any:
    """prod.dim_int: integers exactly."""
    given = self if dtype in (-1, None) else cast(self, onnx_ir.DataType(dtype))
    if not len(self.shape):
        return OP.Identity(given)
    if given.dtype.is_floating_point():
        return OP.ReduceProd(given, ints(dim), keepdims=int(keepdim))
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
    places = (ints(i) if keepdim else OP.Constant(value_int=i) for i in range(size))
    factors = (OP.Gather(wide, place, axis=axis) for place in places)
    return _narrow(functools.reduce(OP.Mul, factors), given.dtype)


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
        return OP.Div(total, count)
    return _floor_divide(total, count)


def _extreme_with_nan(target: Any, index: Any, src: Any, dim: int, kind: str) -> Any:
    """Extremes with NaN, which ONNX Runtime keeps by its position only.

    No issue says so: https://github.com/microsoft/onnxruntime/blob/main/onnxruntime/core/providers/cpu/tensor/scatter.cc
    (`Func_Max`).
    """
    extreme = _scattered(target, index, src, dim, kind)
    flags = [OP.Cast(OP.IsNaN(some), to=TYPES.INT32) for some in (target, src)]
    nan = OP.ScatterElements(flags[0], index, flags[1], axis=dim, reduction="max")
    return OP.Where(OP.Cast(nan, to=TYPES.BOOL), scalar(math.nan, target.dtype), extreme)


def _scattered(target: Any, index: Any, src: Any, dim: int, reduction: str) -> Any:
    return OP.ScatterElements(target, index, src, axis=dim, reduction=reduction)


def _filled(like: Any, number: float) -> Any:
    return typed(OP.Expand(scalar(number, like.dtype), OP.Shape(like)), like.dtype)


def _ends(dtype: onnx_ir.DataType) -> tuple[float, float]:
    if dtype.is_floating_point():
        return -math.inf, math.inf
    if dtype == TYPES.BOOL:
        return False, True
    return int(dtype.min), int(dtype.max)


def _repeat_interleave(self: Any, repeats: Any, dim: int | None = None, output_size: Any = None) -> Any:
    """repeat_interleave.self_int(Tensor self, SymInt repeats, int? dim, *, SymInt? output_size).

    Where `repeats` is a size, onnxscript repeats along another axis: https://github.com/microsoft/onnxscript/pull/2548
    has one 1 too few before it.
    """
    given = OP.Reshape(self, ints(-1)) if dim is None else self
    rank = 1 if dim is None else len(self.shape)
    axis = 0 if dim is None else dim % rank
    one = ints(1)
    times = ints(repeats) if isinstance(repeats, int) else OP.Reshape(repeats, one)
    before, after = OP.Constant(value_ints=[1] * (axis + 1)), [1] * (rank - axis - 1)
    ones = [before, times, *([OP.Constant(value_ints=after)] if after else [])]
    repeated = OP.Expand(OP.Unsqueeze(given, ints(axis + 1)), OP.Concat(*ones, axis=0))
    size = OP.Mul(OP.Shape(given, start=axis, end=axis + 1), times)
    shape = OP.Concat(OP.Shape(given, start=0, end=axis), size, OP.Shape(given, start=axis + 1), axis=0)
    return OP.Reshape(repeated, shape, allowzero=1)


# --- functions of numbers ---------------------------------------------------------------------------------------------


def _atan2(self: Any, other: Any) -> Any:
    """atan2 with signed zeros, infinities and NaN.

    onnxscript makes every NaN 0, and loses the signs of zeros: https://github.com/microsoft/onnxscript/pull/2557, for
    https://github.com/pytorch/pytorch/issues/162570.
    """
    y, x = _wide(self), _wide(other)
    zero, one, pi = (scalar(number, y.dtype) for number in (0, 1, math.pi))

    def negative(value: Any) -> Any:  # also -0.0, whose inverse is -inf
        return OP.Or(OP.Less(value, zero), OP.And(OP.Equal(value, zero), OP.Less(OP.Div(one, value), zero)))

    both = OP.And(OP.IsInf(y), OP.IsInf(x))
    a = OP.Where(both, one, OP.Abs(y))
    b = OP.Where(both, one, OP.Abs(x))
    swap = OP.Greater(a, b)
    low, high = OP.Where(swap, b, a), OP.Where(swap, a, b)
    angle = OP.Atan(OP.Where(OP.Equal(high, zero), zero, OP.Div(low, high)))
    angle = OP.Where(swap, OP.Sub(scalar(math.pi / 2, y.dtype), angle), angle)
    angle = OP.Where(negative(x), OP.Sub(pi, angle), angle)
    angle = OP.Where(negative(y), OP.Neg(angle), angle)
    unknown = OP.Or(OP.IsNaN(y), OP.IsNaN(x))
    return _narrow(OP.Where(unknown, scalar(math.nan, y.dtype), angle), self.dtype)


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
    if attn_mask.dtype != TYPES.BOOL:
        seen = OP.Not(OP.Equal(attn_mask, scalar(-math.inf, attn_mask.dtype)))
    flags, last = OP.Cast(seen, to=TYPES.INT32), ints(-1)
    anything = OP.Cast(OP.ReduceMax(flags, last, keepdims=1), to=TYPES.BOOL)
    return OP.Where(anything, answer, scalar(0, query.dtype))


def _group_norm(
    input: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, cudnn_enabled: bool = True
) -> Any:
    """group_norm, also of an empty batch, whose size onnxscript cannot infer.

    https://github.com/microsoft/onnxscript/pull/1750 says that it does not.
    """
    shape, groups = OP.Shape(input), ints(num_groups)
    batch = OP.Shape(input, start=0, end=1)
    size = OP.Div(OP.ReduceProd(OP.Shape(input, start=1), keepdims=1), groups)
    grouped = OP.Reshape(input, OP.Concat(batch, groups, size, axis=0), allowzero=1)
    scale, shift = (OP.Expand(scalar(number, input.dtype), groups) for number in (1, 0))
    normal = OP.Reshape(OP.InstanceNormalization(grouped, scale, shift, epsilon=eps), shape, allowzero=1)
    axes = OP.Constant(value_ints=list(range(1, len(input.shape) - 1)))
    if weight is not None:
        normal = OP.Mul(normal, OP.Unsqueeze(weight, axes) if len(input.shape) > 2 else weight)
    if bias is not None:
        normal = OP.Add(normal, OP.Unsqueeze(bias, axes) if len(input.shape) > 2 else bias)
    return normal


# --- dtypes -----------------------------------------------------------------------------------------------------------


def _pair(self: Any, other: Any) -> tuple[Any, Any]:
    if isinstance(other, (bool, int, float)):
        return self, scalar(other, self.dtype)
    if isinstance(self, (bool, int, float)):
        return scalar(self, other.dtype), other
    return self, other


def _wide(value: Any) -> Any:
    """Casts to a dtype for which ONNX Runtime has every kernel."""
    dtype = value.dtype
    wide = TYPES.FLOAT if dtype.is_floating_point() else TYPES.INT64
    return cast(value, dtype if dtype in (TYPES.DOUBLE, TYPES.INT32) else wide)


def _narrow(value: Any, dtype: onnx_ir.DataType) -> Any:
    """Casts a result to the dtype that torch returns. ONNX Runtime leaves out a cast that changes nothing."""
    return OP.Cast(value, to=dtype)


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
