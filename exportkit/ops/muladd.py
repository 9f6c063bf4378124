"""Multiply and add: the smallest operator, and the one to copy for a new one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from exportkit.ops._call import call
from exportkit.ops._checks import check_alike, check_floating, check_same_shape
from exportkit.ops._reference import accumulated
from exportkit.ops._spec import OpSpec, Refusal, Sample


def muladd(a: Tensor, b: Tensor, c: float) -> Tensor:
    """Elementwise a * b + c, with a number c.

    Args:
        a: Any shape, floating.
        b: Of the shape, dtype and device of `a`.
        c: Any number.

    Returns:
        The shape and dtype of `a`.

    Raises:
        RuntimeError: Wrong dtype, shape or device.
    """
    return call(torch.ops.arr_coc.muladd.default, a, b, c)


def muladd_reference(a: Tensor, b: Tensor, c: float) -> Tensor:
    """`muladd` in ATen."""
    return (accumulated(a) * accumulated(b) + c).to(a.dtype)


@torch.library.register_fake("arr_coc::muladd")
def _muladd_fake(a: Tensor, b: Tensor, c: float) -> Tensor:
    op = "muladd"
    check_floating(op, "a", a)
    check_alike(op, "a", a, "b", b)
    check_same_shape(op, "a", a, "b", b)
    return a.new_empty(a.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, _ = inputs
    ctx.save_for_backward(a, b)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    a, b = ctx.saved_tensors
    need_a, need_b, _ = ctx.needs_input_grad
    return grad * b if need_a else None, grad * a if need_b else None, None


torch.library.register_autograd("arr_coc::muladd", _backward, setup_context=_setup_context)


def _samples(device: torch.device, dtype: torch.dtype) -> Iterable[Sample]:
    for shape in [(2, 5, 8), (1, 3), (5, 17, 33), (0, 3), (2, 0, 3), (), (2, 8193)]:
        a, b = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
        yield Sample(f"shape {list(shape)}", (a, b, 0.5))


def _refusals(device: torch.device) -> Iterable[Refusal]:
    a = torch.randn(2, 3, device=device)
    yield Refusal("int64", (a.long(), a, 1.0), "a must be float32.* got int64")
    yield Refusal("b of other dtype", (a, a.half(), 1.0), "b is float16, a is float32")
    yield Refusal("b to broadcast", (a, a[:1], 1.0), r"b has shape \[1, 3\], a has shape \[2, 3\]")
    yield Refusal("b of other rank", (a, a[0], 1.0), r"b has shape \[3\], a has shape \[2, 3\]")


_BY_POSITION = {0: "B", 1: "N", 2: "D"}
SPEC = OpSpec(
    name="muladd",
    wrapper=muladd,
    reference=muladd_reference,
    samples=_samples,
    refusals=_refusals,
    differentiable=("a", "b"),
    dynamic={"a": _BY_POSITION, "b": _BY_POSITION},
    second_order=True,
)
