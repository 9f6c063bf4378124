"""Root mean square normalisation to int8, as a Triton kernel inside a package."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.library import wrap_triton

from exportkit.arr_coc.ops._autograd import register_no_derivative
from exportkit.arr_coc.ops._operator import OpSpec, Sample
from exportkit.arr_coc.ops.rms_norm_quantize import LAYOUT, NO_SLOPE, TOLERANCES, rms_norm_quantize_reference, samples
from exportkit.arr_coc.ops.triton._register import (
    HAS_TRITON,
    NAMESPACE,
    programs,
    rows_and_columns,
    runs_triton,
    tile,
    triton_op,
)

if HAS_TRITON:
    from exportkit.arr_coc.ops.triton import _kernels


def rms_norm_quantize(x: Tensor, weight: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Rows y = x / sqrt(mean(x^2) + eps) * weight as integers and a step: y ~ quantized * scale, scale = max |y| / 127.

    y is computed in float32 (float64 for float64) and never rounded to a half type. quantized = round(y / scale), ties
    to even. A row of zeros gives scale 0 and zeros; a row with non-finite y gives scale NaN or infinity and zeros; a
    row with a scale below 2^-126 counts as zeros. Not differentiable: requesting a gradient raises.
    """
    return torch.ops.arr_coc_triton.rms_norm_quantize(x, weight, eps)


@triton_op("rms_norm_quantize")
def _rms_norm_quantize(x: Tensor, weight: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    LAYOUT.check("rms_norm_quantize", {"x": x, "weight": weight, "eps": eps})
    x, weight = x.contiguous(), weight.contiguous()
    if not runs_triton(x):
        return rms_norm_quantize_reference(x, weight, eps)
    rows, columns = rows_and_columns(x)
    out = torch.empty_like(x, dtype=torch.int8)
    scales = x.new_empty(x.shape[:-1], dtype=torch.float32)
    if (held := tile(columns, 1024)) is not None:
        of_one, block = held
        wrap_triton(_kernels.rms_norm_quantize_rows)[programs(rows, of_one)](
            x, weight, out, scales, rows, columns, EPS=eps, ROWS=of_one, BLOCK=block, num_warps=max(1, block // 1024)
        )
    else:
        wrap_triton(_kernels.rms_norm_quantize_long_row)[(rows,)](
            x, weight, out, scales, columns, EPS=eps, BLOCK=4096, num_warps=8
        )
    return out, scales


register_no_derivative("rms_norm_quantize", NO_SLOPE, NAMESPACE)


def _samples(device: torch.device, dtype: torch.dtype) -> Iterable[Sample]:
    yield from samples(device, dtype)
    for value in (torch.nan, torch.inf, -torch.inf):
        row = torch.randn(5, 9, device=device).to(dtype).index_fill(1, torch.tensor([4], device=device), value)
        yield Sample(f"{value} in a long row", (row.repeat(1, 2000), torch.randn(18000, device=device).to(dtype)))


SPEC = OpSpec(
    name="rms_norm_quantize",
    namespace=NAMESPACE,
    wrapper=rms_norm_quantize,
    reference=rms_norm_quantize_reference,
    layout=LAYOUT,
    samples=_samples,
    tolerances=TOLERANCES,
    autocast="first",
)
