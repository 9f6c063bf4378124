"""a + b as a Triton kernel inside a package, the smallest example."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.library import wrap_triton

from exportkit.arr_coc.ops._operator import Layout, OpSpec, Sample
from exportkit.arr_coc.ops._reference import accumulated
from exportkit.arr_coc.ops.triton._register import HAS_TRITON, NAMESPACE, programs, runs_triton, triton_op

if HAS_TRITON:
    from exportkit.arr_coc.ops.triton._kernels import add_elements


def add(a: Tensor, b: Tensor) -> Tensor:
    """Returns a + b, contiguous, without broadcasting. Gradients of any order work."""
    return torch.ops.arr_coc_triton.add(a, b)


def add_reference(a: Tensor, b: Tensor) -> Tensor:
    """Computes `add` in ATen."""
    return (accumulated(a) + accumulated(b)).to(a.dtype)


_LAYOUT = Layout(inputs={"a": "...", "b": "..."}, outputs=["..."])


@triton_op("add")
def _add(a: Tensor, b: Tensor) -> Tensor:
    _LAYOUT.check("add", {"a": a, "b": b})
    a, b = a.contiguous(), b.contiguous()
    if not runs_triton(a):
        return add_reference(a, b)
    out, block = torch.empty_like(a), 2048
    wrap_triton(add_elements)[programs(a.numel(), block)](a, b, out, a.numel(), BLOCK=block, num_warps=8)
    return out


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    return grad, grad


_add.register_autograd(_backward)


def _samples(device: torch.device, dtype: torch.dtype) -> Iterable[Sample]:
    for shape in [(2, 3, 8), (5, 4, 8), (1, 7), (1,), (0, 3), (2, 0, 3), (5, 17, 33), (), (2, 4097)]:
        a, b = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
        yield Sample(f"shape {list(shape)}", (a, b))
    special = torch.tensor([[torch.inf, -torch.inf, torch.nan, -0.0, 6e4]], device=device, dtype=dtype)
    yield Sample("infinities, NaN, overflow of float16", (special, special.flip(-1)))


SPEC = OpSpec(
    name="add",
    namespace=NAMESPACE,
    wrapper=add,
    reference=add_reference,
    layout=_LAYOUT,
    samples=_samples,
    differentiable=("a", "b"),
    second_order=True,
)
