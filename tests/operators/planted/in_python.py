"""The fake kernels and gradients of kernels.cpp, and operators whose fault is in Python. table.py says what is wrong.

Every operator is given to `exportkit ops check` as this file, with `--op-library` and the library of kernels.cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("planted", "FRAGMENT")


def _rows(x: Tensor) -> None:
    torch._check(x.dim() == 2, lambda: "x must have 2 dimensions")


def _floating(*tensors: Tensor) -> None:
    torch._check(all(t.is_floating_point() for t in tensors), lambda: "x must be floating")


def _dense(x: Tensor, *_: Any) -> Tensor:
    _floating(x)
    return x.new_empty(x.shape)


def _dense_rows(x: Tensor, *_: Any) -> Tensor:
    _rows(x)
    return _dense(x)


def _row_values(x: Tensor, *_: Any) -> Tensor:
    return _dense_rows(x).new_empty(x.shape[0])


def _column_values(x: Tensor) -> Tensor:
    return _dense_rows(x).new_empty(x.shape[1])


def _image(x: Tensor) -> Tensor:
    torch._check(x.dim() == 4, lambda: "x must have 4 dimensions")
    return _dense(x)


def _weighted(x: Tensor, weight: Tensor) -> Tensor:
    torch._check(weight.dim() == 1 and weight.dtype == x.dtype, lambda: "weight must be a row")
    torch._check(weight.shape[0] == x.shape[-1], lambda: "weight must have a number for each column")
    return _dense_rows(x)


def _weighted_of_any_length(x: Tensor, weight: Tensor) -> Tensor:
    torch._check(weight.dim() == 1 and weight.dtype == x.dtype, lambda: "weight must be a row")
    return _dense_rows(x)


def _weighted_of_one(x: Tensor, weight: Tensor) -> Tensor:
    torch._check(weight.shape[0] in (1, x.shape[-1]), lambda: "weight must have a number for each column")
    return _weighted_of_any_length(x, weight)


def _weighted_of_any_dtype(x: Tensor, weight: Tensor) -> Tensor:
    torch._check(weight.dim() == 1 and weight.shape[0] == x.shape[1], lambda: "weight must fit")
    return _dense_rows(x)


def _k(x: Tensor, k: int) -> Tensor:
    torch._check(0 < k < 1000, lambda: "k must be positive")
    return _row_values(x)


def _gathered(x: Tensor, index: Tensor) -> Tensor:
    torch._check(index.dim() == 1 and index.dtype == torch.int64, lambda: "index must be a vector of int64")
    return _dense_rows(x).new_empty(index.shape[0], x.shape[1])


def _biased(x: Tensor, bias: Tensor | None = None) -> Tensor:
    if bias is not None:
        torch._check(bias.dim() == 1 and bias.shape[0] == x.shape[-1], lambda: "bias must fit the columns")
    return _dense_rows(x)


def _of_list(xs: list[Tensor]) -> Tensor:
    torch._check(len(xs) > 0, lambda: "xs must have a tensor")
    for x in xs:
        torch._check(x.shape == xs[0].shape and x.dtype == xs[0].dtype, lambda: "xs must be alike")
    return _dense(xs[0])


def _parts(x: Tensor) -> tuple[Tensor, Tensor]:
    torch._check(x.dim() > 0 and x.shape[0] > 0, lambda: "x must have rows")
    return _dense(x), x.new_empty(1, *x.shape[1:])


_FAKES: dict[Callable[..., Any], str] = {
    _row_values: "right_row_sum row_sum_from_one row_sum_short sum_tail fixed_buffer empty_row leaking narrow_sum "
    "cancelling_variance max_without_nan",
    _column_values: "sum_from_garbage racing_sum",
    _dense_rows: "right_softmax rows_short narrow_index static_scratch static_scratch_for_long_rows "
    "softmax_not_shifted",
    _dense: "right_half vector_tail grain_tail flat_strides aligned_only peels_two tail_not_written cached_by_address "
    "float_in_double clamp_without_nan zero_without_sign scale_of_the_batch halves_its_argument same_tensor "
    "wrong_constant",
    _image: "channels_as_they_lie",
    _weighted: "right_weighted",
    _weighted_of_any_length: "weight_length_unchecked",
    _weighted_of_one: "weight_of_one",
    _weighted_of_any_dtype: "weight_as_float",
    _k: "k_unchecked",
    _gathered: "index_unchecked",
    _biased: "bias_ignored",
    _of_list: "last_ignored",
    _parts: "part_of_the_other",
}
for _fake, _names in _FAKES.items():
    for _name in _names.split():
        torch.library.register_fake(f"planted::{_name}", _fake, lib=_LIBRARY)


# --- operators in Python ----------------------------------------------------------------------------------------------


def _operator(
    name: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any] = _dense,
    schema: str = "(Tensor x) -> Tensor",
    backward: Callable[..., Any] | None = None,
    key: str = "CPU",
) -> None:
    _LIBRARY.define(name + schema)

    def below_autograd(*args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():  # as a kernel in C++
            return kernel(*args)

    _LIBRARY.impl(name, below_autograd, key)
    torch.library.register_fake(f"planted::{name}", fake, lib=_LIBRARY)
    if backward is not None:
        torch.library.register_autograd(f"planted::{name}", backward, setup_context=_saved, lib=_LIBRARY)


def _saved(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*(value for value in inputs if isinstance(value, Tensor)))


def _half(x: Tensor) -> Tensor:
    _floating(x)
    return x.contiguous() * 0.5


def _float32(kernel: Callable[..., Any]) -> Callable[..., Any]:
    def checked(x: Tensor, *others: Any) -> Any:
        torch._check(x.dtype == torch.float32, lambda: "x must be float32")
        return kernel(x, *others)

    return checked


# --- fake kernels -----------------------------------------------------------------------------------------------------


def _padded(x: Tensor) -> Tensor:
    _rows(x)
    _floating(x)
    return torch.nn.functional.pad(x, (0, -x.shape[1] % 4)).clone()


def _padded_once_more(x: Tensor) -> Tensor:
    return _dense_rows(x).new_empty(x.shape[0], (x.shape[1] // 4 + 1) * 4)


def _promoted(x: Tensor, y: Tensor) -> Tensor:
    torch._check(x.shape == y.shape, lambda: "x and y must have one shape")
    _floating(x, y)
    return x.contiguous() + y.contiguous()


def _not_promoted(x: Tensor, y: Tensor) -> Tensor:
    torch._check(x.shape == y.shape, lambda: "x and y must have one shape")
    _floating(x, y)
    return x.new_empty(x.shape)


def _two_halves(x: Tensor) -> Tensor:
    _rows(x)
    return torch.cat([_half(x), _half(x)], 1)


def _two_halves_of_int(x: Tensor) -> Tensor:
    return _dense_rows(x).new_empty(x.shape[0], 2 * int(x.shape[1]))


def _sums(x: Tensor) -> Tensor:
    _rows(x)
    _floating(x)
    return x.sum(1, dtype=torch.float32)


_operator("fake_dtype", _sums, _row_values)
_operator("fake_strides", _half, lambda x: torch.empty_like(x, dtype=_dense(x).dtype))
_operator("fake_device", _half, lambda x: torch.empty_like(_dense(x), device="meta"))
_operator("fake_batch", _sums, lambda x: _dense_rows(x).new_empty(1, dtype=torch.float32))
_operator("fake_int", _two_halves, _two_halves_of_int)
_operator("fake_rounding", _padded, _padded_once_more)
_operator("fake_promotion", _promoted, _not_promoted, "(Tensor x, Tensor y) -> Tensor")


# --- gradients --------------------------------------------------------------------------------------------------------


def _sine_backward(ctx: Any, grad: Tensor) -> Tensor:
    return grad * ctx.saved_tensors[0].cos()


def _sine(x: Tensor) -> Tensor:
    _floating(x)
    return x.contiguous().sin()


def _without_incoming(ctx: Any, grad: Tensor) -> Tensor:
    return ctx.saved_tensors[0].cos()


def _with_factor(ctx: Any, grad: Tensor) -> Tensor:
    return 2 * grad * ctx.saved_tensors[0].cos()


def _with_small_factor(ctx: Any, grad: Tensor) -> Tensor:
    return 1.05 * grad * ctx.saved_tensors[0].cos()


def _with_sign(ctx: Any, grad: Tensor) -> Tensor:
    return -grad * ctx.saved_tensors[0].cos()


def _scaled(x: Tensor, weight: Tensor) -> Tensor:
    _weighted(x, weight)
    return x.contiguous() * weight


def _not_summed(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    x, weight = ctx.saved_tensors
    return grad * weight, grad * x


def _of_one_alone(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return grad * ctx.saved_tensors[1], None


def _normalised(x: Tensor) -> Tensor:
    _rows(x)
    _floating(x)
    x = x.contiguous()
    return x / x.square().sum(1, keepdim=True).add(1e-6).sqrt()


def _normalised_backward(ctx: Any, grad: Tensor) -> Tensor:
    x = ctx.saved_tensors[0]
    norm = x.square().sum(1, keepdim=True).add(1e-6).sqrt()
    return grad / norm - x * (grad * x).sum(1, keepdim=True) / norm**3


def _without_term(ctx: Any, grad: Tensor) -> Tensor:
    x = ctx.saved_tensors[0]
    return grad / x.square().sum(1, keepdim=True).add(1e-6).sqrt()


def _signed(x: Tensor, negative: bool) -> Tensor:
    return -_half(x) if negative else _half(x)


def _without_flag(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return grad * 0.5, None


def _cube(x: Tensor) -> Tensor:
    _floating(x)
    return x.contiguous() ** 3


class _CubeGradient(torch.autograd.Function):
    """Of x cubed, with another derivative than its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, grad: Tensor) -> Tensor:
        ctx.save_for_backward(x, grad)
        return 3 * x.square() * grad

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor]:
        x, grad = ctx.saved_tensors
        return 3 * x * grad * upstream, 3 * x.square() * upstream


def _cube_backward(ctx: Any, grad: Tensor) -> Tensor:
    return _CubeGradient.apply(ctx.saved_tensors[0], grad)


def _dense_backward(ctx: Any, grad: Tensor) -> Tensor:
    return 0.5 * grad.as_strided(grad.shape, torch.empty(grad.shape).stride())


def _narrow_backward(ctx: Any, grad: Tensor) -> Tensor:
    return grad.float() * 0.5


_NEGATIVE = "(Tensor x, bool negative) -> Tensor"
_WITH_WEIGHT = "(Tensor x, Tensor weight) -> Tensor"
_operator("right_sine", _sine, backward=_sine_backward)
_operator("right_sine_float32", _float32(_sine), _float32(_dense), backward=_sine_backward)
_operator("right_norm_float32", _float32(_normalised), _float32(_dense_rows), backward=_normalised_backward)
_operator("gradient_without_incoming", _sine, backward=_without_incoming)
_operator("gradient_factor", _sine, backward=_with_factor)
_operator("gradient_not_summed", _scaled, _weighted, _WITH_WEIGHT, _not_summed)
_operator("gradient_of_one_alone", _scaled, _weighted, _WITH_WEIGHT, _of_one_alone)
_operator("gradient_flag", _signed, schema=_NEGATIVE, backward=_without_flag)
_operator("gradient_of_gradient", _cube, backward=_cube_backward)
_operator("gradient_strides", _half, backward=_dense_backward)
_operator("gradient_dtype", _half, backward=_narrow_backward)
_operator("gradient_factor_float32", _float32(_sine), _float32(_dense), backward=_with_small_factor)
_operator("gradient_sign_float32", _float32(_sine), _float32(_dense), backward=_with_sign)
_operator("gradient_term_float32", _float32(_normalised), _float32(_dense_rows), backward=_without_term)


# --- memory and state -------------------------------------------------------------------------------------------------

_ANSWERS: dict[tuple[Any, ...], Tensor] = {}
_HELD: list[Tensor] = [torch.empty(0)]


def _into_one_answer(x: Tensor) -> Tensor:
    out = _ANSWERS.setdefault((x.shape, x.dtype), _half(x))
    return out.copy_(_half(x))


def _held(x: Tensor) -> Tensor:
    _HELD[0] = x
    return _half(x)


def _transposed_answer(x: Tensor) -> Tensor:
    _rows(x)
    return _half(x.mT).mT


_operator("one_answer", _into_one_answer)
_operator("holds_its_argument", _held)
_operator("transposed_answer", _transposed_answer, _dense_rows)


def half(x: Tensor) -> Tensor:
    """What wrong_constant should compute."""
    return x * 0.5
