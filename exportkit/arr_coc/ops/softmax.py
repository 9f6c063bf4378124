"""Softmax over the last dimension."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from exportkit.arr_coc.ops._autograd import register_gradient
from exportkit.arr_coc.ops._operator import ArrCocSpec, Layout, Sample, operator_like
from exportkit.arr_coc.ops._reference import accumulated


def softmax_reference(x: Tensor) -> Tensor:
    """exp(x - max x) divided by its sum, over the last dimension.

    As in torch.softmax, -inf gives 0, and a row is NaN if it contains NaN or inf, or only -inf. Half types are computed
    in float32 and rounded once.
    """
    return torch.softmax(accumulated(x), -1).to(x.dtype)


softmax = operator_like(softmax_reference)


def softmax_grad_reference(grad: Tensor, output: Tensor) -> Tensor:
    """Gradient of `softmax`: output * (grad - sum of grad * output)."""
    g, y = accumulated(grad), accumulated(output)
    return (y * (g - (g * y).sum(-1, keepdim=True))).to(output.dtype)


softmax_grad = operator_like(softmax_grad_reference)


def _setup_grad_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _grad_backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Differentiates y (g - sum g y), which is linear in g; for y, the product rule applies."""
    grad, output = ctx.saved_tensors
    need_grad, need_output = ctx.needs_input_grad
    of_grad = softmax_grad(upstream, output) if need_grad else None
    if not need_output:
        return of_grad, None
    u, g, y = (accumulated(t) for t in (upstream, grad, output))
    of_output = u * (g - (g * y).sum(-1, keepdim=True)) - g * (u * y).sum(-1, keepdim=True)
    return of_grad, of_output.to(output.dtype)


register_gradient("softmax", softmax_grad)
torch.library.register_autograd("arr_coc::softmax_grad", _grad_backward, setup_context=_setup_grad_context)


def _samples(device: torch.device, dtype: torch.dtype) -> Iterable[Sample]:
    shapes = [(2, 5, 8), (1, 3, 7), (5, 17, 33), (0, 3, 4), (2, 0, 4), (2, 3, 0), (5, 1), (1,), (2, 1, 3, 16)]
    long = [(2, 197), (5, 512), (2, 520), (2, 1031), (2, 4104), (2, 16384), (1, 16391), (2, 40000)]
    for shape in shapes + long:
        yield Sample(f"x {list(shape)}", (torch.randn(shape, device=device, dtype=dtype) * 3,))
    inf, nan = torch.inf, torch.nan
    rows = [[0, -inf, 1, 2], [-inf, -inf, -inf, -inf], [0, inf, 1, -inf], [nan, 0, -inf, inf], [6e4, -6e4, 6e4, 0]]
    yield Sample("NaN and infinities", (torch.tensor(rows, device=device, dtype=dtype),))


def _grad_samples(device: torch.device, dtype: torch.dtype) -> Iterable[Sample]:
    for sample in _samples(device, dtype):
        output = softmax_reference(*sample.args)
        yield Sample(sample.label, (torch.randn_like(output), output))


LAYOUT = Layout(inputs={"x": "... D"}, outputs=["... D"])
SPEC = ArrCocSpec(
    wrapper=softmax,
    reference=softmax_reference,
    layout=LAYOUT,
    samples=_samples,
    differentiable=("x",),
    autocast="float32",
    second_order=True,
)
GRAD_LAYOUT = Layout(inputs={"output": "... D", "grad": "... D"}, outputs=["... D"])
GRAD_SPEC = ArrCocSpec(
    wrapper=softmax_grad,
    reference=softmax_grad_reference,
    layout=GRAD_LAYOUT,
    samples=_grad_samples,
    differentiable=("grad", "output"),
    second_order=True,
)
