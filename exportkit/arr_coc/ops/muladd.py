"""Multiply and add: a small, complete operator to copy for a new one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from exportkit.arr_coc.ops._autograd import register_gradient
from exportkit.arr_coc.ops._operator import ArrCocSpec, Layout, Sample, operator_like
from exportkit.arr_coc.ops._reference import accumulated


def muladd_reference(a: Tensor, b: Tensor, c: float) -> Tensor:
    """Elementwise a * b + c, with a number c."""
    return (accumulated(a) * accumulated(b) + c).to(a.dtype)


muladd = operator_like(muladd_reference)


def muladd_grad_reference(grad: Tensor, a: Tensor, b: Tensor, need_a: bool, need_b: bool) -> tuple[Tensor, Tensor]:
    """Gradients of `muladd`: grad * b and grad * a, reading `grad` once."""
    nothing = a.new_empty(0)
    return grad * b if need_a else nothing, grad * a if need_b else nothing


muladd_grad = operator_like(muladd_grad_reference)


def _setup_grad_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.need_a, ctx.need_b = inputs
    ctx.save_for_backward(*tensors)


def _grad_backward(ctx: Any, of_a: Tensor, of_b: Tensor) -> tuple[Tensor | None, ...]:
    """Applies the product rule to grad * b and grad * a."""
    grad, a, b = ctx.saved_tensors
    need_grad, need_a, need_b, *_ = ctx.needs_input_grad
    products = [of * x for of, x, needed in ((of_a, b, ctx.need_a), (of_b, a, ctx.need_b)) if needed]
    of_grad = sum(products, torch.zeros_like(a)) if need_grad else None
    second = of_b * grad if need_a and ctx.need_b else None, of_a * grad if need_b and ctx.need_a else None
    return of_grad, *second, None, None


register_gradient("muladd", muladd_grad)
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


SPEC = ArrCocSpec(
    wrapper=muladd,
    reference=muladd_reference,
    layout=Layout(inputs={"a": "...", "b": "..."}, outputs=["..."]),
    samples=_samples,
    differentiable=("a", "b"),
    second_order=True,
)
GRAD_SPEC = ArrCocSpec(
    wrapper=muladd_grad,
    reference=muladd_grad_reference,
    layout=Layout(inputs={"a": "...", "b": "...", "grad": "..."}, outputs=["like a if need_a", "like b if need_b"]),
    samples=_grad_samples,
)
