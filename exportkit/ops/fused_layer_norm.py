"""Layer normalisation over the last dimension, in one pass over memory each way."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from exportkit.contract.operator_spec import OpSpec, Refusal, Sample
from exportkit.ops._autograd import register_no_second_derivative
from exportkit.ops._call import operator
from exportkit.ops._checks import check, check_alike, check_dtype, check_floating, check_rank, check_same_size, shape_of
from exportkit.ops._reference import accumulated

_fused_layer_norm = operator("fused_layer_norm")
_fused_layer_norm_grad = operator("fused_layer_norm_grad")


def fused_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """Layer norm over the last dimension: (x - mean) / sqrt(variance + eps) * weight + bias.

    The variance is biased and computed from deviations from the mean, so values far from 0 do not lose digits. The
    operator `arr_coc::fused_layer_norm` also returns mean and 1 / sqrt(variance + eps) of each row for its gradient.

    Args:
        x: [..., D] with D >= 1, floating.
        weight: [D], with the dtype and device of `x`.
        bias: [D], with the dtype and device of `x`.
        eps: A number that is at least 0.

    Returns:
        [..., D], in the dtype of `x`.

    Raises:
        RuntimeError: An argument has a wrong shape or dtype, or eps < 0.
    """
    return _fused_layer_norm(x, weight, bias, eps)[0]


def fused_layer_norm_reference(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """Computes `fused_layer_norm` in ATen."""
    return fused_layer_norm_decomposition(x, weight, bias, eps)[0]


def fused_layer_norm_decomposition(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes `fused_layer_norm` and what its gradient needs, the means and 1 / deviation of the rows, in ATen."""
    wide = accumulated(x)
    mean = wide.mean(-1, keepdim=True)
    centred = wide - mean
    rest = centred.mean(-1, keepdim=True)  # the rounding error of a mean far from 0
    centred = centred - rest
    rstd = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    y = (centred * rstd * accumulated(weight) + accumulated(bias)).to(x.dtype)
    return y, (mean + rest).squeeze(-1), rstd.squeeze(-1)


def fused_layer_norm_grad(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    need_x: bool,
    need_weight: bool,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `fused_layer_norm`, with z = (x - mean) rstd, g = grad weight, and means over the row.

    d x = rstd (g - mean(g) - z mean(g z)); d weight = sum of grad z over the rows; d bias = sum of grad.

    Args:
        grad: [..., D], with the dtype and device of `x`.
        x: [..., D].
        weight: [D].
        mean: [...], float32 (float64 for float64), from the forward call.
        rstd: [...], float32 (float64 for float64), from the forward call.
        need_x: Whether to compute the gradient of `x`. A gradient that is not computed has shape [0].
        need_weight: Whether to compute the gradient of `weight`.
        need_bias: Whether to compute the gradient of `bias`.

    Returns:
        Gradients of x, weight and bias, each with its argument's shape.
    """
    return _fused_layer_norm_grad(grad, x, weight, mean, rstd, need_x, need_weight, need_bias)


def fused_layer_norm_grad_reference(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    need_x: bool,
    need_weight: bool,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes `fused_layer_norm_grad` in ATen."""
    upstream, rstd = accumulated(grad), rstd.unsqueeze(-1)
    z = (accumulated(x) - mean.unsqueeze(-1)) * rstd
    g = upstream * accumulated(weight)
    of_x = rstd * (g - g.mean(-1, keepdim=True) - z * (g * z).mean(-1, keepdim=True))
    rows = list(range(x.dim() - 1))
    of_weight, of_bias = ((upstream * z).sum(rows), upstream.sum(rows)) if rows else (upstream * z, upstream)
    nothing = x.new_empty(0)
    return (
        of_x.to(x.dtype) if need_x else nothing,
        of_weight.to(x.dtype) if need_weight else nothing.clone(),
        of_bias.to(x.dtype) if need_bias else nothing.clone(),
    )


def _check_rows(op: str, x: Tensor, weight: Tensor) -> None:
    check_floating(op, "x", x)
    rows_only = f"{op}: x must be [..., D] with D >= 1, got shape {shape_of(x)}"
    check(x.dim() >= 1, rows_only)
    check(x.shape[-1] >= 1, rows_only)
    check_rank(op, "weight", weight, 1, "[D]")
    check_alike(op, "x", x, "weight", weight)
    check_same_size(op, "D", "weight", weight.shape[0], "x", x.shape[-1])


def _statistics_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


@torch.library.register_fake("arr_coc::fused_layer_norm")
def _fused_layer_norm_fake(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> tuple[Tensor, Tensor, Tensor]:
    op = "fused_layer_norm"
    _check_rows(op, x, weight)
    check_rank(op, "bias", bias, 1, "[D]")
    check_alike(op, "x", x, "bias", bias)
    check_same_size(op, "D", "bias", bias.shape[0], "x", x.shape[-1])
    check(eps >= 0, f"{op}: eps must be >= 0, got {eps:g}")
    mean, rstd = (x.new_empty(x.shape[:-1], dtype=_statistics_dtype(x)) for _ in range(2))
    return x.new_empty(x.shape), mean, rstd


@torch.library.register_fake("arr_coc::fused_layer_norm_grad")
def _fused_layer_norm_grad_fake(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    need_x: bool,
    need_weight: bool,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    op = "fused_layer_norm_grad"
    _check_rows(op, x, weight)
    check_alike(op, "x", x, "grad", grad)
    other_shape = f"{op}: grad must have the shape of x, {shape_of(x)}, got shape {shape_of(grad)}"
    _check_sizes(other_shape, grad, x.shape)
    for name, statistic in (("mean", mean), ("rstd", rstd)):
        check_dtype(op, name, statistic, _statistics_dtype(x))
        check(statistic.device == x.device, f"{op}: {name} and x must be on one device")
        one_a_row = f"{op}: {name} must have one value a row of x, of shape {shape_of(x)}, got {shape_of(statistic)}"
        _check_sizes(one_a_row.replace("got [", "got shape ["), statistic, x.shape[:-1])
    return (
        x.new_empty(x.shape if need_x else (0,)),
        x.new_empty(weight.shape if need_weight else (0,)),
        x.new_empty(weight.shape if need_bias else (0,)),
    )


def _check_sizes(message: str, tensor: Tensor, sizes: torch.Size) -> None:
    check(tensor.dim() == len(sizes), message)
    for size, expected in zip(tensor.shape, sizes):
        check(size == expected, message)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, weight, _, _ = inputs
    _, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weight, mean, rstd)


def _backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return None, None, None, None
    needs = ctx.needs_input_grad[:3]
    gradients = fused_layer_norm_grad(grad, *ctx.saved_tensors, *needs)
    return *(g if need else None for g, need in zip(gradients, needs)), None


torch.library.register_autograd("arr_coc::fused_layer_norm", _backward, setup_context=_setup_context)
register_no_second_derivative("fused_layer_norm_grad")


# Past the registers of a warp, a few warps and a block, in every dtype.
_WIDE = [(2, 1024), (3, 1028), (2, 2051), (2, 4104), (1, 16385), (2, 20000)]


def _samples(device: torch.device, dtype: torch.dtype) -> Iterable[Sample]:
    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    for shape in [(2, 8), (5, 33), (1, 1), (0, 4), (2, 0, 4), (2, 3, 4, 5), (5, 1, 256), (37, 130), *_WIDE]:
        yield Sample(f"x {list(shape)}", (normal(*shape), normal(shape[-1]), normal(shape[-1])))
    yield Sample("one row", (normal(7)[:1], normal(1), normal(1)))
    yield Sample("eps = 0.5", (normal(2, 8), normal(8), normal(8), 0.5))
    equal = normal(5, 9).index_fill(0, torch.tensor([1], device=device), 3.0)
    yield Sample("a row of equal values", (equal, normal(9), normal(9)))
    for value in (torch.nan, torch.inf):
        spoilt = normal(5, 9)
        spoilt[2, 4] = value
        yield Sample(f"{value} in a row", (spoilt, normal(9), normal(9)))


def _grad_samples(device: torch.device, dtype: torch.dtype) -> Iterable[Sample]:
    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    shapes = [(2, 4, 8), (5, 1, 33), (1, 1), (0, 4), (2, 0, 4), (2, 3, 4, 5), (5, 1, 256), (40, 50, 3), (37, 7, 130)]
    shapes += [(2, 2, width) for _, width in _WIDE]
    for index, shape in enumerate(shapes):
        x = normal(*shape)
        wide = accumulated(x)
        rstd = torch.rsqrt(wide.var(-1, correction=0) + 1e-5)
        needs = [(True, True, True), (True, False, False), (False, True, True), (True, True, False)][index % 4]
        args = normal(*shape), x, normal(shape[-1]), wide.mean(-1), rstd
        yield Sample(f"x {list(shape)}, {needs}", (*args, *needs))
        yield Sample(f"x {list(shape)}, everything", (*args, True, True, True))
    yield Sample("no gradient at all", (*args, False, False, False))


def _refusals(device: torch.device) -> Iterable[Refusal]:
    x, weight = torch.randn(2, 3, 4, device=device), torch.randn(4, device=device)
    yield Refusal("rank 0", (x[0, 0, 0], weight, weight), r"x must be \[..., D\] with D >= 1, got shape \[\]")
    yield Refusal("D = 0", (x[..., :0], weight[:0], weight[:0]), r"with D >= 1, got shape \[2, 3, 0\]")
    yield Refusal("int64", (x.long(), weight, weight), "x must be float32.* got int64")
    yield Refusal("weight of rank 2", (x, x[0], weight), r"weight must be \[D\], got shape \[3, 4\]")
    yield Refusal("weight of other dtype", (x, weight.double(), weight), "weight is float64, x is float32")
    yield Refusal("weight of other D", (x, weight[:3], weight), "weight has D = 3, x has D = 4")
    yield Refusal("bias of rank 2", (x, weight, x[0]), r"bias must be \[D\], got shape \[3, 4\]")
    yield Refusal("bias of other dtype", (x, weight, weight.half()), "bias is float16, x is float32")
    yield Refusal("bias of other D", (x, weight, weight[:1]), "bias has D = 1, x has D = 4")
    yield Refusal("eps -1", (x, weight, weight, -1.0), "eps must be >= 0, got -1")
    yield Refusal("eps NaN", (x, weight, weight, math.nan), "eps must be >= 0, got nan")


def _grad_refusals(device: torch.device) -> Iterable[Refusal]:
    x, weight, row = torch.randn(2, 3, 4, device=device), torch.randn(4, device=device), torch.rand(2, 3, device=device)
    all_needed = True, True, True
    yield Refusal("D = 0", (x, x[..., :0], weight, row, row, *all_needed), "with D >= 1")
    yield Refusal("grad of other shape", (x[0], x, weight, row, row, *all_needed), r"the shape of x, \[2, 3, 4\], got")
    yield Refusal("grad of other dtype", (x.half(), x, weight, row, row, *all_needed), "grad is float16, x is float32")
    yield Refusal("mean of half type", (x, x, weight, row.half(), row, *all_needed), "mean must be float32, got float1")
    yield Refusal("mean of other rank", (x, x, weight, x, row, *all_needed), "mean must have one value a row of x")
    yield Refusal("rstd of other size", (x, x, weight, row, row[:1], *all_needed), r"a row of x.* got shape \[1, 3\]")
    yield Refusal("weight of other D", (x, x, weight[:3], row, row, *all_needed), "weight has D = 3, x has D = 4")


SPEC = OpSpec(
    name="fused_layer_norm",
    wrapper=fused_layer_norm,
    reference=fused_layer_norm_reference,
    decomposition=fused_layer_norm_decomposition,
    samples=_samples,
    refusals=_refusals,
    differentiable=("x", "weight", "bias"),
    dynamic={"x": {0: "B"}},
    autocast="first",
)
GRAD_SPEC = OpSpec(
    name="fused_layer_norm_grad",
    wrapper=fused_layer_norm_grad,
    reference=fused_layer_norm_grad_reference,
    samples=_grad_samples,
    refusals=_grad_refusals,
    dynamic={"grad": {0: "B"}, "x": {0: "B"}, "mean": {0: "B"}, "rstd": {0: "B"}},
    autocast=None,  # mean and rstd are wider than the rest
)
