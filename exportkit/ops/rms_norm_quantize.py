"""Root mean square normalisation with an int8 result, for a following integer matrix product."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from exportkit.contract.operator_spec import OpSpec, Refusal, Sample
from exportkit.ops._call import operator
from exportkit.ops._checks import check, check_alike, check_floating, check_rank, check_same_size, shape_of
from exportkit.ops._reference import accumulated

_rms_norm_quantize = operator("rms_norm_quantize")

QUANTIZED_MAX = 127

SCALE_MIN = torch.finfo(torch.float32).tiny
"""Rows with a smaller scale count as zeros, because 1 / scale would overflow."""


def rms_norm_quantize(x: Tensor, weight: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Rows y = x / sqrt(mean(x^2) + eps) * weight as integers and a step: y ~ quantized * scale, scale = max |y| / 127.

    y is computed in float32 (float64 for float64) and never rounded to a half type. quantized = round(y / scale), ties
    to even, so the error is at most half a step, apart from rounding. A row of zeros gives scale 0 and zeros; a row
    with non-finite y gives scale NaN or infinity and zeros; a row with a scale below 2^-126 counts as zeros.
    Not differentiable: requesting a gradient raises.

    Args:
        x: [..., D] with D >= 1, floating.
        weight: [D], with the dtype and device of `x`.
        eps: At least 0.

    Returns:
        int8 [..., D] in [-127, 127], and float32 [...].

    Raises:
        RuntimeError: An argument has a wrong shape or dtype, or eps < 0.
    """
    return _rms_norm_quantize(x, weight, eps)


def rms_norm_quantize_reference(x: Tensor, weight: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Computes `rms_norm_quantize` in ATen."""
    wide = accumulated(x)
    weighted = wide * accumulated(weight)
    inverse_rms = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    highest = weighted.abs().amax(-1, keepdim=True)
    highest = torch.where(highest > 0, highest * inverse_rms, highest)  # 0 stays 0 where 1 / rms is infinite
    scale = (highest / QUANTIZED_MAX).float()
    scale = torch.where(scale < SCALE_MIN, 0.0, scale)
    steps = torch.where((scale > 0) & scale.isfinite(), weighted * inverse_rms / scale, 0.0)
    return steps.round().clamp(-QUANTIZED_MAX, QUANTIZED_MAX).to(torch.int8), scale.squeeze(-1)


@torch.library.register_fake("arr_coc::rms_norm_quantize")
def _rms_norm_quantize_fake(x: Tensor, weight: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    op = "rms_norm_quantize"
    check_floating(op, "x", x)
    rows_only = f"{op}: x must be [..., D] with D >= 1, got shape {shape_of(x)}"
    check(x.dim() >= 1, rows_only)
    check(x.shape[-1] >= 1, rows_only)
    check_rank(op, "weight", weight, 1, "[D]")
    check_alike(op, "x", x, "weight", weight)
    check_same_size(op, "D", "weight", weight.shape[0], "x", x.shape[-1])
    check(eps >= 0, f"{op}: eps must be >= 0, got {eps:g}")
    return x.new_empty(x.shape, dtype=torch.int8), x.new_empty(x.shape[:-1], dtype=torch.float32)


def _backward(ctx: Any, *grads: Any) -> Any:
    raise RuntimeError(
        "arr_coc::rms_norm_quantize is not differentiable: rounding has no useful slope; "
        "train with a straight-through estimate, or detach the input"
    )


# Without a rule torch only warns and the gradient is None.
torch.library.register_autograd("arr_coc::rms_norm_quantize", _backward)


def _samples(device: torch.device, dtype: torch.dtype) -> Iterable[Sample]:
    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    shapes = [(2, 8), (5, 33), (1, 1), (0, 4), (2, 0, 4), (2, 3, 4, 5), (5, 1, 256), (2, 130), (3, 515), (2, 1024)]
    # More than the registers of a warp, a few warps and a block hold, in every dtype.
    shapes += [(3, 1028), (2, 2051), (2, 4104), (1, 16385), (2, 20000)]
    for shape in shapes:
        yield Sample(f"x {list(shape)}", (normal(*shape), normal(shape[-1])))
    yield Sample("one row", (normal(7)[:1], normal(1)))
    yield Sample("squares past float16", (normal(2, 64) * 300, normal(64)))
    yield Sample("eps = 0.5", (normal(2, 8), normal(8), 0.5))
    zero_row = normal(5, 9).index_fill(0, torch.tensor([1], device=device), 0.0)
    yield Sample("a row of zeros", (zero_row, normal(9)))
    yield Sample("a row of zeros, eps = 0", (zero_row, normal(9), 0.0))
    yield Sample("weights of zero", (normal(2, 9), normal(9) * 0))
    for value in (torch.nan, torch.inf, -torch.inf):
        yield Sample(f"{value} in a row", (zero_row.index_fill(1, torch.tensor([4], device=device), value), normal(9)))
        held = normal(9).index_fill(0, torch.tensor([4], device=device), value)
        yield Sample(f"{value} in the weights", (zero_row, held))


def _refusals(device: torch.device) -> Iterable[Refusal]:
    x, weight = torch.randn(2, 3, 4, device=device), torch.randn(4, device=device)
    yield Refusal("rank 0", (x[0, 0, 0], weight), r"x must be \[..., D\] with D >= 1, got shape \[\]")
    yield Refusal("D = 0", (x[..., :0], weight[:0]), r"with D >= 1, got shape \[2, 3, 0\]")
    yield Refusal("int64", (x.long(), weight), "x must be float32.* got int64")
    yield Refusal("weight of rank 2", (x, x[0]), r"weight must be \[D\], got shape \[3, 4\]")
    yield Refusal("weight of other dtype", (x, weight.double()), "weight is float64, x is float32")
    yield Refusal("weight of other D", (x, weight[:3]), "weight has D = 3, x has D = 4")
    yield Refusal("eps -1", (x, weight, -1.0), "eps must be >= 0, got -1")
    yield Refusal("eps NaN", (x, weight, math.nan), "eps must be >= 0, got nan")


SPEC = OpSpec(
    name="rms_norm_quantize",
    wrapper=rms_norm_quantize,
    reference=rms_norm_quantize_reference,
    samples=_samples,
    refusals=_refusals,
    dynamic={"x": {0: "B"}},
    tolerances={
        torch.float32: (1e-5, 0.0),
        torch.int8: (0.0, 1.0),  # a value close to a tie may be rounded to either side
    },
    autocast="first",
)
