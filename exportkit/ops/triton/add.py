"""a + b as a Triton kernel inside a package, the smallest example."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.library import wrap_triton

from exportkit.contract.operator_spec import OpSpec, Refusal, Sample
from exportkit.ops._checks import check_alike, check_floating, check_same_shape
from exportkit.ops._reference import accumulated
from exportkit.ops.triton._register import HAS_TRITON, NAMESPACE, programs, runs_triton, triton_op

if HAS_TRITON:
    from exportkit.ops.triton._kernels import add_elements


def add(a: Tensor, b: Tensor) -> Tensor:
    """Returns a + b without broadcasting. Gradients of any order work.

    Args:
        a: A floating tensor.
        b: A tensor with the shape, dtype and device of `a`.

    Returns:
        A contiguous tensor with the same shape and dtype.

    Raises:
        RuntimeError: An argument has a wrong dtype, device or shape.
    """
    return torch.ops.arr_coc_triton.add(a, b)


def add_reference(a: Tensor, b: Tensor) -> Tensor:
    """Computes `add` in ATen."""
    return (accumulated(a) + accumulated(b)).to(a.dtype)


@triton_op("add")
def _add(a: Tensor, b: Tensor) -> Tensor:
    check_floating("add", "a", a)
    check_alike("add", "a", a, "b", b)
    check_same_shape("add", "a", a, "b", b)
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


def _refusals(device: torch.device) -> Iterable[Refusal]:
    a, b = torch.rand(2, 3, device=device), torch.rand(2, 3, device=device)
    yield Refusal("int64", (a.long(), b.long()), "a must be float32.* got int64")
    yield Refusal("b of other dtype", (a, b.double()), "b is float64, a is float32; they must have one dtype")
    yield Refusal("b to broadcast", (a, b[:1]), r"b has shape \[1, 3\], a has shape \[2, 3\]; they must be equal")
    yield Refusal("b of other rank", (a, b[0]), r"b has shape \[3\], a has shape \[2, 3\]; they must be equal")


SPEC = OpSpec(
    name="add",
    namespace=NAMESPACE,
    wrapper=add,
    reference=add_reference,
    samples=_samples,
    refusals=_refusals,
    differentiable=("a", "b"),
    dynamic={"a": {0: "B", 1: "N"}, "b": {0: "B", 1: "N"}},
    second_order=True,
)
