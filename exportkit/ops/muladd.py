"""Multiply and add: a small, complete operator to copy for a new one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from exportkit.contract.operator_spec import OpSpec, Refusal, Sample
from exportkit.ops._call import operator
from exportkit.ops._checks import check_alike, check_floating, check_same_shape
from exportkit.ops._reference import accumulated

_muladd = operator("muladd")
_muladd_grad = operator("muladd_grad")


def muladd(a: Tensor, b: Tensor, c: float) -> Tensor:
    """Elementwise a * b + c, with a number c.

    Args:
        a: Any shape, floating.
        b: A tensor with the shape, dtype and device of `a`.
        c: Any number.

    Returns:
        A tensor with the shape and dtype of `a`.

    Raises:
        RuntimeError: An argument has a wrong dtype, shape or device.
    """
    return _muladd(a, b, c)


def muladd_reference(a: Tensor, b: Tensor, c: float) -> Tensor:
    """Computes `muladd` in ATen."""
    return (accumulated(a) * accumulated(b) + c).to(a.dtype)


def muladd_grad(grad: Tensor, a: Tensor, b: Tensor, need_a: bool, need_b: bool) -> tuple[Tensor, Tensor]:
    """Gradients of `muladd`: grad * b and grad * a, reading `grad` once.

    Args:
        grad: A tensor with the shape, dtype and device of `a`.
        a: Any shape, floating.
        b: A tensor with the shape, dtype and device of `a`.
        need_a: Whether to compute the gradient of `a`. A gradient that is not computed has shape [0].
        need_b: Whether to compute the gradient of `b`.

    Returns:
        Gradients of a and b, with their shape and dtype.
    """
    return _muladd_grad(grad, a, b, need_a, need_b)


def muladd_grad_reference(grad: Tensor, a: Tensor, b: Tensor, need_a: bool, need_b: bool) -> tuple[Tensor, Tensor]:
    """Computes `muladd_grad` in ATen."""
    nothing = a.new_empty(0)
    return grad * b if need_a else nothing, grad * a if need_b else nothing


@torch.library.register_fake("arr_coc::muladd")
def _muladd_fake(a: Tensor, b: Tensor, c: float) -> Tensor:
    op = "muladd"
    check_floating(op, "a", a)
    check_alike(op, "a", a, "b", b)
    check_same_shape(op, "a", a, "b", b)
    return a.new_empty(a.shape)


@torch.library.register_fake("arr_coc::muladd_grad")
def _muladd_grad_fake(grad: Tensor, a: Tensor, b: Tensor, need_a: bool, need_b: bool) -> tuple[Tensor, Tensor]:
    op = "muladd_grad"
    check_floating(op, "a", a)
    for name, other in (("b", b), ("grad", grad)):
        check_alike(op, "a", a, name, other)
        check_same_shape(op, "a", a, name, other)
    return a.new_empty(a.shape if need_a else (0,)), a.new_empty(a.shape if need_b else (0,))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, _ = inputs
    ctx.save_for_backward(a, b)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    a, b = ctx.saved_tensors
    need_a, need_b, _ = ctx.needs_input_grad
    of_a, of_b = muladd_grad(grad, a, b, need_a, need_b)
    return of_a if need_a else None, of_b if need_b else None, None


def _setup_grad_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.need_a, ctx.need_b = inputs
    ctx.save_for_backward(*tensors)


def _grad_backward(
    ctx: Any, of_a: Tensor, of_b: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
    """Applies the product rule to grad * b and grad * a."""
    grad, a, b = ctx.saved_tensors
    need_grad, need_a, need_b = ctx.needs_input_grad[:3]
    products = [of * x for of, x, needed in ((of_a, b, ctx.need_a), (of_b, a, ctx.need_b)) if needed]
    return (
        sum(products, torch.zeros_like(a)) if need_grad else None,
        of_b * grad if need_a and ctx.need_b else None,
        of_a * grad if need_b and ctx.need_a else None,
        None,
        None,
    )


torch.library.register_autograd("arr_coc::muladd", _backward, setup_context=_setup_context)
torch.library.register_autograd("arr_coc::muladd_grad", _grad_backward, setup_context=_setup_grad_context)


def _samples(device: torch.device, dtype: torch.dtype) -> Iterable[Sample]:
    for shape in [(2, 5, 8), (1, 3), (5, 17, 33), (0, 3), (2, 0, 3), (), (2, 8193)]:
        a, b = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
        yield Sample(f"shape {list(shape)}", (a, b, 0.5))


def _grad_samples(device: torch.device, dtype: torch.dtype) -> Iterable[Sample]:
    for index, sample in enumerate(_samples(device, dtype)):
        a, b, _ = sample.args
        needs = [(True, True), (True, True), (False, True), (True, False)][index % 4]
        yield Sample(sample.label, (torch.randn_like(a), a, b, *needs))


def _refusals(device: torch.device) -> Iterable[Refusal]:
    a = torch.randn(2, 3, device=device)
    yield Refusal("int64", (a.long(), a, 1.0), "a must be float32.* got int64")
    yield Refusal("b of other dtype", (a, a.half(), 1.0), "b is float16, a is float32")
    yield Refusal("b to broadcast", (a, a[:1], 1.0), r"b has shape \[1, 3\], a has shape \[2, 3\]")
    yield Refusal("b of other rank", (a, a[0], 1.0), r"b has shape \[3\], a has shape \[2, 3\]")


def _grad_refusals(device: torch.device) -> Iterable[Refusal]:
    a, needs = torch.randn(2, 3, device=device), (True, True)
    yield Refusal("int64", (a, a.long(), a, *needs), "a must be float32.* got int64")
    yield Refusal("b of other dtype", (a, a, a.half(), *needs), "b is float16, a is float32")
    yield Refusal("b of other shape", (a, a, a[:1], *needs), r"b has shape \[1, 3\], a has shape \[2, 3\]")
    yield Refusal("grad of other dtype", (a.half(), a, a, *needs), "grad is float16, a is float32")
    yield Refusal("grad to broadcast", (a[:1], a, a, *needs), r"grad has shape \[1, 3\], a has shape \[2, 3\]")


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
GRAD_SPEC = OpSpec(
    name="muladd_grad",
    wrapper=muladd_grad,
    reference=muladd_grad_reference,
    samples=_grad_samples,
    refusals=_grad_refusals,
    dynamic={"grad": _BY_POSITION, "a": _BY_POSITION, "b": _BY_POSITION},
)
