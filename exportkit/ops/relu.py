"""Rectified linear unit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from exportkit.contract.operator_spec import OpSpec, Refusal, Sample
from exportkit.ops._call import operator
from exportkit.ops._checks import check_alike, check_floating, check_same_shape

_relu = operator("relu")
_relu_grad = operator("relu_grad")


def relu(x: Tensor) -> Tensor:
    """max(x, 0), NaN where x is NaN.

    Args:
        x: Any shape, floating.

    Returns:
        A tensor with the shape and dtype of `x`.

    Raises:
        RuntimeError: The dtype is wrong.
    """
    return _relu(x)


def relu_reference(x: Tensor) -> Tensor:
    """Computes `relu` in ATen."""
    return torch.relu(x)


def relu_grad(grad: Tensor, output: Tensor) -> Tensor:
    """Gradient of `relu`: 0 where output <= 0, else grad. Like torch's, it passes where the output is NaN.

    Args:
        grad: A tensor with the shape, dtype and device of `output`.
        output: The result of `relu`.

    Returns:
        A tensor with the shape and dtype of `output`.
    """
    return _relu_grad(grad, output)


def relu_grad_reference(grad: Tensor, output: Tensor) -> Tensor:
    """Computes `relu_grad` in ATen."""
    return torch.where(output <= 0, 0, grad)


@torch.library.register_fake("arr_coc::relu")
def _relu_fake(x: Tensor) -> Tensor:
    check_floating("relu", "x", x)
    return x.new_empty(x.shape)


@torch.library.register_fake("arr_coc::relu_grad")
def _relu_grad_fake(grad: Tensor, output: Tensor) -> Tensor:
    op = "relu_grad"
    check_floating(op, "output", output)
    check_alike(op, "output", output, "grad", grad)
    check_same_shape(op, "output", output, "grad", grad)
    return output.new_empty(output.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output)


def _backward(ctx: Any, grad: Tensor) -> Tensor:
    return relu_grad(grad, *ctx.saved_tensors)


def _setup_grad_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _grad_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return relu_grad(grad, *ctx.saved_tensors), None  # constant in `output`, except where that is 0


torch.library.register_autograd("arr_coc::relu", _backward, setup_context=_setup_context)
torch.library.register_autograd("arr_coc::relu_grad", _grad_backward, setup_context=_setup_grad_context)


def _samples(device: torch.device, dtype: torch.dtype) -> Iterable[Sample]:
    for shape in [(2, 5, 8), (1, 3), (5, 17, 33), (0, 3), (2, 0, 3), (), (2, 8193)]:
        yield Sample(f"shape {list(shape)}", (torch.randn(shape, device=device, dtype=dtype),))
    special = torch.tensor([[torch.nan, torch.inf], [-torch.inf, 0.0], [-0.0, -torch.nan]], device=device, dtype=dtype)
    yield Sample("NaN and infinities", (special,))


def _grad_samples(device: torch.device, dtype: torch.dtype) -> Iterable[Sample]:
    for sample in _samples(device, dtype):
        (x,) = sample.args
        yield Sample(sample.label, (torch.randn_like(x), torch.relu(x)))


def _refusals(device: torch.device) -> Iterable[Refusal]:
    yield Refusal("int64", (torch.ones(3, device=device).long(),), "relu: x must be float32.* got int64")


def _grad_refusals(device: torch.device) -> Iterable[Refusal]:
    x = torch.rand(2, 3, device=device)
    yield Refusal("int64", (x, x.long()), "output must be float32.* got int64")
    yield Refusal("grad of other dtype", (x.half(), x), "grad is float16, output is float32")
    yield Refusal("grad to broadcast", (x[:1], x), r"grad has shape \[1, 3\], output has shape \[2, 3\]")
    yield Refusal("grad of other rank", (x[0], x), r"grad has shape \[3\], output has shape \[2, 3\]")


_BY_POSITION = {0: "B", 1: "N", 2: "D"}
SPEC = OpSpec(
    name="relu",
    wrapper=relu,
    reference=relu_reference,
    samples=_samples,
    refusals=_refusals,
    differentiable=("x",),
    dynamic={"x": _BY_POSITION},
    second_order=True,
)
GRAD_SPEC = OpSpec(
    name="relu_grad",
    wrapper=relu_grad,
    reference=relu_grad_reference,
    samples=_grad_samples,
    refusals=_grad_refusals,
    differentiable=("grad",),
    dynamic={"grad": _BY_POSITION, "output": _BY_POSITION},
    second_order=True,
)
