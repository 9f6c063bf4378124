"""Root mean square normalisation to int8, as a Triton kernel inside a package."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.library import wrap_triton

from exportkit.arr_coc.ops._autograd import register_no_derivative
from exportkit.arr_coc.ops._spec import OpSpec, Sample
from exportkit.arr_coc.ops.rms_norm_quantize import LAYOUT, NO_SLOPE, rms_norm_quantize_reference
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
    from exportkit.arr_coc.ops.triton._kernels import rms_norm_quantize_long_row, rms_norm_quantize_rows


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
        wrap_triton(rms_norm_quantize_rows)[programs(rows, of_one)](
            x, weight, out, scales, rows, columns, EPS=eps, ROWS=of_one, BLOCK=block, num_warps=max(1, block // 1024)
        )
    else:
        wrap_triton(rms_norm_quantize_long_row)[(rows,)](
            x, weight, out, scales, columns, EPS=eps, BLOCK=4096, num_warps=8
        )
    return out, scales


register_no_derivative("rms_norm_quantize", NO_SLOPE, NAMESPACE)


def _samples(device: torch.device, dtype: torch.dtype) -> Iterable[Sample]:
    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    for shape in [
        (2, 8),
        (5, 33),
        (1, 1),
        (0, 4),
        (2, 0, 4),
        (2, 3, 4, 5),
        (5, 1, 256),
        (2, 1024),
        (2, 2051),
        (2, 20000),
    ]:
        yield Sample(f"x {list(shape)}", (normal(*shape), normal(shape[-1])))
    yield Sample("one row", (normal(7)[:1], normal(1)))
    yield Sample("squares past float16", (normal(2, 64) * 300, normal(64)))
    yield Sample("eps = 0.5", (normal(2, 8), normal(8), 0.5))
    zero_row = normal(5, 9).index_fill(0, torch.tensor([1], device=device), 0.0)
    yield Sample("a row of zeros", (zero_row, normal(9)))
    yield Sample("a row of zeros, eps = 0", (zero_row, normal(9), 0.0))
    yield Sample("weights of zero", (normal(2, 9), normal(9) * 0))
    for value in (torch.nan, torch.inf, -torch.inf):
        held = zero_row.index_fill(1, torch.tensor([4], device=device), value)
        yield Sample(f"{value} in a row", (held, normal(9)))
        yield Sample(f"{value} in a long row", (held.repeat(1, 2000), normal(18000)))
        yield Sample(f"{value} in the weights", (zero_row, held[0]))


SPEC = OpSpec(
    name="rms_norm_quantize",
    namespace=NAMESPACE,
    wrapper=rms_norm_quantize,
    reference=rms_norm_quantize_reference,
    layout=LAYOUT,
    samples=_samples,
    tolerances={
        torch.float32: (1e-5, 0.0),
        torch.int8: (0.0, 1.0),  # a value close to a tie may be rounded to either side
    },
    autocast="first",
)
