"""Scale, bias and rectified linear unit in one pass over memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from exportkit.arr_coc.ops._autograd import register_gradient
from exportkit.arr_coc.ops._operator import ArrCocSpec, Layout, Sample, operator_like
from exportkit.arr_coc.ops._reference import accumulated
from exportkit.arr_coc.ops.relu import relu_grad, relu_grad_reference


def scale_bias_relu_reference(x: Tensor, bias: Tensor, scale: float) -> Tensor:
    """relu(x * scale + bias), NaN where that is NaN.

    Half types are computed in float32 and rounded once, so x * scale may exceed their range. The scale is a number and
    not a tensor, so the gradient needs only the output.
    """
    return torch.relu(accumulated(x) * scale + accumulated(bias)).to(x.dtype)


scale_bias_relu = operator_like(scale_bias_relu_reference)


def scale_bias_relu_grad_reference(
    grad: Tensor, output: Tensor, scale: float, need_x: bool, need_bias: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of `scale_bias_relu` and, with a scale of 1, of `bias_relu`.

    With passed = 0 where output <= 0, else grad: d x = passed * scale, d bias = the sum of passed over all rows.
    """
    passed = relu_grad_reference(accumulated(grad), output)
    of_bias = passed.sum(list(range(output.dim() - 1))) if output.dim() > 1 else passed
    gradients = zip((passed * scale, of_bias), (need_x, need_bias))
    of_x, of_bias = (g.to(output.dtype) if need else output.new_empty(0) for g, need in gradients)
    return of_x, of_bias


scale_bias_relu_grad = operator_like(scale_bias_relu_grad_reference)


def _setup_grad_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, out, *ctx.rest = inputs
    ctx.save_for_backward(out)


def _grad_backward(ctx: Any, of_x: Tensor, of_bias: Tensor) -> tuple[Tensor, None, None, None, None]:
    """Computes the transpose, because both gradients are linear in `grad`."""
    (output,) = ctx.saved_tensors
    scale, need_x, need_bias = ctx.rest
    of_passed = accumulated(of_x) * scale if need_x else torch.zeros_like(accumulated(output))
    of_passed = of_passed + accumulated(of_bias) if need_bias else of_passed
    return relu_grad(of_passed.to(output.dtype), output), None, None, None, None


register_gradient("scale_bias_relu", scale_bias_relu_grad)
torch.library.register_autograd("arr_coc::scale_bias_relu_grad", _grad_backward, setup_context=_setup_grad_context)


def _samples(device: torch.device, dtype: torch.dtype) -> Iterable[Sample]:
    for shape in [(2, 5, 8), (1, 3, 7), (5, 33, 65), (0, 3, 4), (2, 0, 4), (2, 3, 0), (5, 1), (1,), (3, 2, 1032)]:
        x, bias = (torch.randn(s, device=device, dtype=dtype) for s in (shape, shape[-1:]))
        yield Sample(f"x {list(shape)}", (x, bias, 0.5))
    x, bias = torch.randn(2, 67, 24, device=device, dtype=dtype), torch.randn(24, device=device, dtype=dtype)
    yield Sample("negative scale", (x, bias, -1.25))
    special = torch.tensor([[torch.nan, torch.inf, -torch.inf, 0.0]], device=device, dtype=dtype).expand(2, 4)
    yield Sample("NaN and infinities", (special, torch.zeros(4, device=device, dtype=dtype), 2.0))
    yield Sample("0 times infinity", (special, torch.ones(4, device=device, dtype=dtype), 0.0))


def _grad_samples(device: torch.device, dtype: torch.dtype) -> Iterable[Sample]:
    for index, sample in enumerate(_samples(device, dtype)):
        output = scale_bias_relu_reference(*sample.args)
        needs = [(True, True), (True, True), (False, True), (True, False)][index % 4]
        yield Sample(sample.label, (torch.randn_like(output), output, sample.args[2], *needs))


SPEC = ArrCocSpec(
    wrapper=scale_bias_relu,
    reference=scale_bias_relu_reference,
    layout=Layout(inputs={"x": "... D", "bias": "D"}, outputs=["... D"]),
    samples=_samples,
    differentiable=("x", "bias"),
    autocast="first",
    second_order=True,
)
GRAD_SPEC = ArrCocSpec(
    wrapper=scale_bias_relu_grad,
    reference=scale_bias_relu_grad_reference,
    layout=Layout(inputs={"output": "... D", "grad": "... D"}, outputs=["... D if need_x", "D if need_bias"]),
    samples=_grad_samples,
)
