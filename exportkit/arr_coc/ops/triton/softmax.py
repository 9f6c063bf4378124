"""Softmax of rows, as a Triton kernel inside a package."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.library import wrap_triton

from exportkit.arr_coc.ops._autograd import register_no_second_derivative
from exportkit.arr_coc.ops._operator import OpSpec, Sample
from exportkit.arr_coc.ops.softmax import GRAD_LAYOUT, LAYOUT, softmax_grad_reference, softmax_reference
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


def softmax(x: Tensor) -> Tensor:
    """exp(x) divided by its sum along the last dimension.

    Computed in float32 (float64 for float64) and rounded once. As in torch, a row is NaN if it has NaN or infinity, or
    only -infinity.
    """
    return torch.ops.arr_coc_triton.softmax(x)


def softmax_grad(grad: Tensor, output: Tensor) -> Tensor:
    """Gradient of `softmax`: y (g - sum g y) along the last dimension."""
    return torch.ops.arr_coc_triton.softmax_grad(grad, output)


@triton_op("softmax")
def _softmax(x: Tensor) -> Tensor:
    LAYOUT.check("softmax", {"x": x})
    x = x.contiguous()
    if not runs_triton(x):
        return softmax_reference(x)
    rows, columns = rows_and_columns(x)
    out = torch.empty_like(x)
    if (held := tile(columns, 1024)) is not None:
        of_one, block = held
        wrap_triton(_kernels.softmax_rows)[programs(rows, of_one)](
            x, out, rows, columns, ROWS=of_one, BLOCK=block, num_warps=min(16, max(2, block // 512))
        )
    else:
        wrap_triton(_kernels.softmax_long_row)[(rows,)](x, out, columns, BLOCK=4096, num_warps=8)
    return out


@triton_op("softmax_grad")
def _softmax_grad(grad: Tensor, output: Tensor) -> Tensor:
    GRAD_LAYOUT.check("softmax_grad", {"grad": grad, "output": output})
    grad, output = grad.contiguous(), output.contiguous()
    if not runs_triton(output):
        return softmax_grad_reference(grad, output)
    rows, columns = rows_and_columns(output)
    out = torch.empty_like(output)
    if (held := tile(columns, 1024)) is not None:
        of_one, block = held
        wrap_triton(_kernels.softmax_grad_rows)[programs(rows, of_one)](
            grad, output, out, rows, columns, ROWS=of_one, BLOCK=block, num_warps=min(16, max(2, block // 256))
        )
    else:
        wrap_triton(_kernels.softmax_grad_long_row)[(rows,)](grad, output, out, columns, BLOCK=4096, num_warps=8)
    return out


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output)


def _backward(ctx: Any, grad: Tensor) -> Tensor:
    (output,) = ctx.saved_tensors
    return softmax_grad(grad, output)


_softmax.register_autograd(_backward, setup_context=_setup_context)
register_no_second_derivative("softmax_grad", namespace=NAMESPACE)


def _inputs(device: torch.device, dtype: torch.dtype) -> Iterable[tuple[str, Tensor]]:
    # Rows held in registers and, above 16384 elements, rows processed in blocks.
    for shape in [(2, 5), (5, 3, 7), (1, 1), (0, 4), (2, 0), (1,), (2, 1000), (3, 2, 1025), (2, 16385), (1, 40000)]:
        yield f"x {list(shape)}", torch.randn(shape, device=device).to(dtype)


def _samples(device: torch.device, dtype: torch.dtype) -> Iterable[Sample]:
    for label, x in _inputs(device, dtype):
        yield Sample(label, (x,))
    yield Sample("large values", (torch.randn(2, 33, device=device).mul(1000).to(dtype),))
    infinite = torch.tensor([[-torch.inf, 1.0, 2.0], [-torch.inf] * 3], device=device, dtype=dtype)
    yield Sample("-infinity, and a row of nothing else", (infinite,))
    yield Sample("-infinity in a long row", (infinite.repeat_interleave(6000, -1),))
    special = torch.tensor([[torch.nan, 1.0, 2.0], [torch.inf, 1.0, 2.0], [0.0, 1.0, 2.0]], device=device, dtype=dtype)
    yield Sample("NaN and infinity", (special,))
    yield Sample("NaN and infinity in a long row", (special.repeat_interleave(6000, -1),))


def _grad_samples(device: torch.device, dtype: torch.dtype) -> Iterable[Sample]:
    for label, x in _inputs(device, dtype):
        yield Sample(label, (torch.randn(x.shape, device=device).to(dtype), softmax_reference(x)))


SPEC = OpSpec(
    name="softmax",
    namespace=NAMESPACE,
    wrapper=softmax,
    reference=softmax_reference,
    layout=LAYOUT,
    samples=_samples,
    differentiable=("x",),
)
GRAD_SPEC = OpSpec(
    name="softmax_grad",
    namespace=NAMESPACE,
    wrapper=softmax_grad,
    reference=softmax_grad_reference,
    layout=GRAD_LAYOUT,
    samples=_grad_samples,
)
