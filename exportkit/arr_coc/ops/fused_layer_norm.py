"""Layer normalisation over the last dimension, in one pass over memory each way."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from exportkit.arr_coc.ops._autograd import register_gradient, register_no_second_derivative
from exportkit.arr_coc.ops._operator import ArrCocSpec, Layout, Refusal, Sample, check, normals, operator, operator_like
from exportkit.arr_coc.ops._reference import accumulated

_fused_layer_norm = operator("fused_layer_norm")


def fused_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """Layer norm over the last dimension: (x - mean) / sqrt(variance + eps) * weight + bias.

    The variance is biased and computed from deviations from the mean, so values far from 0 do not lose digits. The
    operator `arr_coc::fused_layer_norm` also returns mean and 1 / sqrt(variance + eps) of each row for its gradient.
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
    """Gradients of `fused_layer_norm`, with z = (x - mean) rstd, g = grad weight, and means over the row.

    d x = rstd (g - mean(g) - z mean(g z)); d weight = sum of grad z over the rows; d bias = sum of grad.
    """
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


fused_layer_norm_grad = operator_like(fused_layer_norm_grad_reference)

register_gradient("fused_layer_norm", fused_layer_norm_grad)
register_no_second_derivative("fused_layer_norm_grad")


def _check_rows(op: str, grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, **_: Any) -> None:
    def check_sizes(tensor: Tensor, sizes: torch.Size, *message: Any) -> None:
        check(tensor.dim() == len(sizes), *message, tensor.shape)
        for size, expected in zip(tensor.shape, sizes):
            check(size == expected, *message, tensor.shape)

    check_sizes(grad, x.shape, op, ": grad must have the shape of x, ", x.shape, ", got shape ")
    for name, statistic in (("mean", mean), ("rstd", rstd)):
        one_a_row = (op, f": {name} must have one value a row of x, of shape ", x.shape, ", got shape ")
        check_sizes(statistic, x.shape[:-1], *one_a_row)


# Past the registers of a warp, a few warps and a block, in every dtype.
_WIDE = [(2, 1024), (3, 1028), (2, 2051), (2, 4104), (1, 16385), (2, 20000)]


def _samples(device: torch.device, dtype: torch.dtype) -> Iterable[Sample]:
    normal = normals(device, dtype)
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
    normal = normals(device, dtype)
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


def _grad_refusals(device: torch.device) -> Iterable[Refusal]:
    x, weight, row = torch.randn(2, 3, 4, device=device), torch.randn(4, device=device), torch.rand(2, 3, device=device)
    all_needed = True, True, True
    yield Refusal("grad of other shape", (x[0], x, weight, row, row, *all_needed), r"the shape of x, \[2, 3, 4\], got")
    yield Refusal("mean of other rank", (x, x, weight, x, row, *all_needed), "mean must have one value a row of x")
    yield Refusal("rstd of other size", (x, x, weight, row, row[:1], *all_needed), r"a row of x.* got shape \[1, 3\]")


SPEC = ArrCocSpec(
    wrapper=fused_layer_norm,
    reference=fused_layer_norm_reference,
    decomposition=fused_layer_norm_decomposition,
    layout=Layout(
        inputs={"x": "... D", "weight": "D", "bias": "D"},
        outputs=["... D", "...: accumulated", "...: accumulated"],
        least={"D": 1},
        numbers={"eps": ">= 0"},
    ),
    static=("D",),
    samples=_samples,
    differentiable=("x", "weight", "bias"),
    autocast="first",
)
GRAD_SPEC = ArrCocSpec(
    wrapper=fused_layer_norm_grad,
    reference=fused_layer_norm_grad_reference,
    layout=Layout(
        inputs={"x": "... D", "weight": "D", "grad": "*", "mean": "*: accumulated", "rstd": "*: accumulated"},
        outputs=["like x if need_x", "like weight if need_weight", "like weight if need_bias"],
        least={"D": 1},
        further=_check_rows,
    ),
    samples=_grad_samples,
    more_refusals=_grad_refusals,
    autocast=None,  # mean and rstd are wider than the rest
)
