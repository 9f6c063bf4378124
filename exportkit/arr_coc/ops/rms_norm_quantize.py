"""Root mean square normalisation with an int8 result, for a following integer matrix product."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from exportkit.arr_coc.ops._autograd import register_no_derivative
from exportkit.arr_coc.ops._operator import ArrCocSpec, Layout, Sample, normals, operator_like
from exportkit.arr_coc.ops._reference import accumulated

QUANTIZED_MAX = 127

SCALE_MIN = torch.finfo(torch.float32).tiny
"""Rows with a smaller scale count as zeros, because 1 / scale would overflow."""


def rms_norm_quantize_reference(x: Tensor, weight: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Rows y = x / sqrt(mean(x^2) + eps) * weight as integers and a step: y ~ quantized * scale, scale = max |y| / 127.

    y is computed in float32 (float64 for float64) and never rounded to a half type. quantized = round(y / scale), ties
    to even, so the error is at most half a step, apart from rounding. A row of zeros gives scale 0 and zeros; a row
    with non-finite y gives scale NaN or infinity and zeros; a row with a scale below 2^-126 counts as zeros.
    Not differentiable: requesting a gradient raises.

    Returns:
        The integers, in [-127, 127], and the scales.
    """
    wide = accumulated(x)
    weighted = wide * accumulated(weight)
    inverse_rms = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    highest = weighted.abs().amax(-1, keepdim=True)
    highest = torch.where(highest > 0, highest * inverse_rms, highest)  # 0 stays 0 where 1 / rms is infinite
    scale = (highest / QUANTIZED_MAX).float()
    scale = torch.where(scale < SCALE_MIN, 0.0, scale)
    steps = torch.where((scale > 0) & scale.isfinite(), weighted * inverse_rms / scale, 0.0)
    return steps.round().clamp(-QUANTIZED_MAX, QUANTIZED_MAX).to(torch.int8), scale.squeeze(-1)


rms_norm_quantize = operator_like(rms_norm_quantize_reference)


NO_SLOPE = (
    "is not differentiable: rounding has no useful slope; train with a straight-through estimate, or detach the input"
)
LAYOUT = Layout(
    inputs={"x": "... D", "weight": "D"},
    outputs=["... D: int8", "...: float32"],
    least={"D": 1},
    numbers={"eps": ">= 0"},
)
# A value close to a tie may be rounded to either side.
TOLERANCES = {torch.float32: (1e-5, 0.0), torch.int8: (0.0, 1.0)}

register_no_derivative("rms_norm_quantize", NO_SLOPE)


def samples(device: torch.device, dtype: torch.dtype) -> Iterable[Sample]:
    """Yields valid calls, also of the Triton form."""
    normal = normals(device, dtype)
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


SPEC = ArrCocSpec(
    wrapper=rms_norm_quantize,
    reference=rms_norm_quantize_reference,
    layout=LAYOUT,
    static=("D",),
    samples=samples,
    tolerances=TOLERANCES,
    autocast="first",
)
