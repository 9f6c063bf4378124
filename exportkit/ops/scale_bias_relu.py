"""Scale, bias and rectified linear unit in one pass over memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from exportkit.contract.operator_spec import OpSpec, Refusal, Sample
from exportkit.ops._call import operator
from exportkit.ops._checks import check, check_alike, check_floating, check_same_shape, shape_of
from exportkit.ops._reference import accumulated
from exportkit.ops.bias_relu import check_x_and_bias
from exportkit.ops.relu import relu_grad, relu_grad_reference

_scale_bias_relu = operator("scale_bias_relu")
_scale_bias_relu_grad = operator("scale_bias_relu_grad")


def scale_bias_relu(x: Tensor, bias: Tensor, scale: float) -> Tensor:
    """relu(x * scale + bias), NaN where that is NaN.

    Half types are computed in float32 and rounded once, so x * scale may exceed their range. The scale is a number and
    not a tensor, so the gradient needs only the output.

    Args:
        x: [..., D], floating.
        bias: [D], with the dtype and device of `x`.
        scale: Any number.

    Returns:
        A tensor with the shape and dtype of `x`.

    Raises:
        RuntimeError: An argument has a wrong rank, size, dtype or device.
    """
    return _scale_bias_relu(x, bias, scale)


def scale_bias_relu_reference(x: Tensor, bias: Tensor, scale: float) -> Tensor:
    """Computes `scale_bias_relu` in ATen."""
    return torch.relu(accumulated(x) * scale + accumulated(bias)).to(x.dtype)


def scale_bias_relu_grad(
    grad: Tensor, output: Tensor, scale: float, need_x: bool, need_bias: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of `scale_bias_relu` and, with a scale of 1, of `bias_relu`.

    With passed = 0 where output <= 0, else grad: d x = passed * scale, d bias = the sum of passed over all rows.

    Args:
        grad: A tensor with the shape, dtype and device of `output`.
        output: [..., D], the result of the forward call.
        scale: The same as in the forward call.
        need_x: Whether to compute the gradient of `x`. A gradient that is not computed has shape [0].
        need_bias: Whether to compute the gradient of `bias`.

    Returns:
        Gradients of x, with the shape of `output`, and of the bias, [D].
    """
    return _scale_bias_relu_grad(grad, output, scale, need_x, need_bias)


def scale_bias_relu_grad_reference(
    grad: Tensor, output: Tensor, scale: float, need_x: bool, need_bias: bool
) -> tuple[Tensor, Tensor]:
    """Computes `scale_bias_relu_grad` in ATen."""
    passed = relu_grad_reference(accumulated(grad), output)
    of_bias = passed.sum(list(range(output.dim() - 1))) if output.dim() > 1 else passed
    gradients = zip((passed * scale, of_bias), (need_x, need_bias))
    of_x, of_bias = (g.to(output.dtype) if need else output.new_empty(0) for g, need in gradients)
    return of_x, of_bias


@torch.library.register_fake("arr_coc::scale_bias_relu")
def _scale_bias_relu_fake(x: Tensor, bias: Tensor, scale: float) -> Tensor:
    check_x_and_bias("scale_bias_relu", x, bias)
    return x.new_empty(x.shape)


@torch.library.register_fake("arr_coc::scale_bias_relu_grad")
def _scale_bias_relu_grad_fake(
    grad: Tensor, output: Tensor, scale: float, need_x: bool, need_bias: bool
) -> tuple[Tensor, Tensor]:
    op = "scale_bias_relu_grad"
    check_floating(op, "output", output)
    check_alike(op, "output", output, "grad", grad)
    check_same_shape(op, "output", output, "grad", grad)
    check(output.dim() > 0, f"{op}: output must be [..., D], got shape {shape_of(output)}")
    return output.new_empty(output.shape if need_x else (0,)), output.new_empty(output.shape[-1] if need_bias else 0)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.scale = inputs[2]
    ctx.save_for_backward(output)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    (output,) = ctx.saved_tensors
    need_x, need_bias, _ = ctx.needs_input_grad
    of_x, of_bias = scale_bias_relu_grad(grad, output, ctx.scale, need_x, need_bias)
    return of_x if need_x else None, of_bias if need_bias else None, None


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


torch.library.register_autograd("arr_coc::scale_bias_relu", _backward, setup_context=_setup_context)
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


def _refusals(device: torch.device) -> Iterable[Refusal]:
    x, bias = torch.rand(2, 3, device=device), torch.rand(3, device=device)
    yield Refusal("int64", (x.long(), bias, 1.0), "x must be float32.* got int64")
    yield Refusal("a scalar x", (x[0, 0], bias, 1.0), r"x must be \[..., D\], got shape \[\]")
    yield Refusal("bias of rank 2", (x, bias[None], 1.0), r"bias must be \[D\], got shape \[1, 3\]")
    yield Refusal("bias of other D", (x, bias[:2], 1.0), "bias has D = 2, x has D = 3")
    yield Refusal("bias of other dtype", (x, bias.half(), 1.0), "bias is float16, x is float32")


def _grad_refusals(device: torch.device) -> Iterable[Refusal]:
    x, rest = torch.rand(2, 3, device=device), (1.0, True, True)
    yield Refusal("int64", (x, x.long(), *rest), "output must be float32.* got int64")
    yield Refusal("grad of other dtype", (x.half(), x, *rest), "grad is float16, output is float32")
    yield Refusal("grad of other shape", (x[:1], x, *rest), r"grad has shape \[1, 3\], output has shape \[2, 3\]")
    yield Refusal("a scalar output", (x[0, 0], x[0, 0], *rest), r"output must be \[..., D\], got shape \[\]")


_BY_POSITION = {0: "B", 1: "N", 2: "D"}
SPEC = OpSpec(
    name="scale_bias_relu",
    wrapper=scale_bias_relu,
    reference=scale_bias_relu_reference,
    samples=_samples,
    refusals=_refusals,
    differentiable=("x", "bias"),
    dynamic={"x": _BY_POSITION, "bias": {0: "D"}},
    autocast="first",
    second_order=True,
)
GRAD_SPEC = OpSpec(
    name="scale_bias_relu_grad",
    wrapper=scale_bias_relu_grad,
    reference=scale_bias_relu_grad_reference,
    samples=_grad_samples,
    refusals=_grad_refusals,
    dynamic={"grad": _BY_POSITION, "output": _BY_POSITION},
)
