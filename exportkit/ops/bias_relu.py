"""Bias and rectified linear unit in one pass over memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from exportkit.contract.operator_spec import OpSpec, Refusal, Sample
from exportkit.ops._call import operator
from exportkit.ops._checks import check, check_alike, check_floating, check_rank, check_same_size, shape_of
from exportkit.ops._reference import accumulated

_bias_relu = operator("bias_relu")
_scale_bias_relu_grad = operator("scale_bias_relu_grad")


def bias_relu(x: Tensor, bias: Tensor) -> Tensor:
    """relu(x + bias), NaN where that is NaN.

    Half types are computed in float32 and rounded once. The gradient is `scale_bias_relu_grad` with a scale of 1, which
    needs only the output.

    Args:
        x: [..., D], floating.
        bias: [D], with the dtype and device of `x`.

    Returns:
        A tensor with the shape and dtype of `x`.

    Raises:
        RuntimeError: An argument has a wrong rank, size, dtype or device.
    """
    return _bias_relu(x, bias)


def bias_relu_reference(x: Tensor, bias: Tensor) -> Tensor:
    """Computes `bias_relu` in ATen."""
    return torch.relu(accumulated(x) + accumulated(bias)).to(x.dtype)


def check_x_and_bias(op: str, x: Tensor, bias: Tensor) -> None:
    """Checks the arguments of `bias_relu` and `scale_bias_relu`."""
    check_floating(op, "x", x)
    check(x.dim() > 0, f"{op}: x must be [..., D], got shape {shape_of(x)}")
    check_rank(op, "bias", bias, 1, "[D]")
    check_alike(op, "x", x, "bias", bias)
    check_same_size(op, "D", "bias", bias.shape[0], "x", x.shape[-1])


@torch.library.register_fake("arr_coc::bias_relu")
def _bias_relu_fake(x: Tensor, bias: Tensor) -> Tensor:
    check_x_and_bias("bias_relu", x, bias)
    return x.new_empty(x.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    need_x, need_bias = ctx.needs_input_grad
    of_x, of_bias = _scale_bias_relu_grad(grad, *ctx.saved_tensors, 1.0, need_x, need_bias)
    return of_x if need_x else None, of_bias if need_bias else None


torch.library.register_autograd("arr_coc::bias_relu", _backward, setup_context=_setup_context)


def _samples(device: torch.device, dtype: torch.dtype) -> Iterable[Sample]:
    for shape in [(2, 5, 8), (1, 3, 7), (5, 33, 65), (0, 3, 4), (2, 0, 4), (2, 3, 0), (5, 1), (1,), (3, 2, 1032)]:
        x, bias = (torch.randn(s, device=device, dtype=dtype) for s in (shape, shape[-1:]))
        yield Sample(f"x {list(shape)}", (x, bias))
    special = torch.tensor([[torch.nan, torch.inf, -torch.inf, 0.0]], device=device, dtype=dtype).expand(2, 4)
    yield Sample("NaN and infinities", (special, torch.zeros(4, device=device, dtype=dtype)))
    yield Sample("infinity less infinity", (special, torch.full((4,), -torch.inf, device=device, dtype=dtype)))


def _refusals(device: torch.device) -> Iterable[Refusal]:
    x, bias = torch.rand(2, 3, device=device), torch.rand(3, device=device)
    yield Refusal("int64", (x.long(), bias), "x must be float32.* got int64")
    yield Refusal("a scalar x", (x[0, 0], bias), r"x must be \[..., D\], got shape \[\]")
    yield Refusal("bias of rank 2", (x, bias[None]), r"bias must be \[D\], got shape \[1, 3\]")
    yield Refusal("bias of other D", (x, bias[:2]), "bias has D = 2, x has D = 3")
    yield Refusal("bias of other dtype", (x, bias.half()), "bias is float16, x is float32")


SPEC = OpSpec(
    name="bias_relu",
    wrapper=bias_relu,
    reference=bias_relu_reference,
    samples=_samples,
    refusals=_refusals,
    differentiable=("x", "bias"),
    dynamic={"x": {0: "B", 1: "N", 2: "D"}, "bias": {0: "D"}},
    autocast="first",
    second_order=True,
)
