"""Softmax over the last dimension."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from exportkit.contract.operator_spec import OpSpec, Refusal, Sample
from exportkit.ops._call import operator
from exportkit.ops._checks import check, check_alike, check_floating, check_same_shape, shape_of
from exportkit.ops._reference import accumulated

_softmax = operator("softmax")
_softmax_grad = operator("softmax_grad")


def softmax(x: Tensor) -> Tensor:
    """exp(x - max x) divided by its sum, over the last dimension.

    As in torch.softmax, -inf gives 0, and a row is NaN if it contains NaN or inf, or only -inf.

    Args:
        x: [..., D], floating; rows of any length.

    Returns:
        A tensor with the shape and dtype of `x`. Half types are computed in float32 and rounded once.

    Raises:
        RuntimeError: The dtype is wrong, or the tensor has no dimensions.
    """
    return _softmax(x)


def softmax_reference(x: Tensor) -> Tensor:
    """Computes `softmax` in ATen."""
    return torch.softmax(accumulated(x), -1).to(x.dtype)


def softmax_grad(grad: Tensor, output: Tensor) -> Tensor:
    """Gradient of `softmax`: output * (grad - sum of grad * output).

    Args:
        grad: A tensor with the shape, dtype and device of `output`.
        output: [..., D], the result of `softmax`.

    Returns:
        A tensor with the shape and dtype of `output`.
    """
    return _softmax_grad(grad, output)


def softmax_grad_reference(grad: Tensor, output: Tensor) -> Tensor:
    """Computes `softmax_grad` in ATen."""
    g, y = accumulated(grad), accumulated(output)
    return (y * (g - (g * y).sum(-1, keepdim=True))).to(output.dtype)


@torch.library.register_fake("arr_coc::softmax")
def _softmax_fake(x: Tensor) -> Tensor:
    op = "softmax"
    check_floating(op, "x", x)
    check(x.dim() > 0, f"{op}: x must be [..., D], got shape {shape_of(x)}")
    return x.new_empty(x.shape)


@torch.library.register_fake("arr_coc::softmax_grad")
def _softmax_grad_fake(grad: Tensor, output: Tensor) -> Tensor:
    op = "softmax_grad"
    check_floating(op, "output", output)
    check(output.dim() > 0, f"{op}: output must be [..., D], got shape {shape_of(output)}")
    check_alike(op, "output", output, "grad", grad)
    check_same_shape(op, "output", output, "grad", grad)
    return output.new_empty(output.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output)


def _backward(ctx: Any, grad: Tensor) -> Tensor:
    return softmax_grad(grad, *ctx.saved_tensors)


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


torch.library.register_autograd("arr_coc::softmax", _backward, setup_context=_setup_context)
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


def _refusals(device: torch.device) -> Iterable[Refusal]:
    x = torch.rand(2, 3, device=device)
    yield Refusal("int64", (x.long(),), "x must be float32.* got int64")
    yield Refusal("a scalar", (x[0, 0],), r"x must be \[..., D\], got shape \[\]")


def _grad_refusals(device: torch.device) -> Iterable[Refusal]:
    x = torch.rand(2, 3, device=device)
    yield Refusal("int64", (x, x.long()), "output must be float32.* got int64")
    yield Refusal("a scalar", (x[0, 0], x[0, 0]), r"output must be \[..., D\], got shape \[\]")
    yield Refusal("grad of other dtype", (x.half(), x), "grad is float16, output is float32")
    yield Refusal("grad of other shape", (x[:1], x), r"grad has shape \[1, 3\], output has shape \[2, 3\]")


_BY_POSITION = {0: "B", 1: "N", 2: "D"}
SPEC = OpSpec(
    name="softmax",
    wrapper=softmax,
    reference=softmax_reference,
    samples=_samples,
    refusals=_refusals,
    differentiable=("x",),
    dynamic={"x": _BY_POSITION},
    autocast="float32",
    second_order=True,
)
GRAD_SPEC = OpSpec(
    name="softmax_grad",
    wrapper=softmax_grad,
    reference=softmax_grad_reference,
    samples=_grad_samples,
    refusals=_grad_refusals,
    differentiable=("grad", "output"),
    dynamic={"grad": _BY_POSITION, "output": _BY_POSITION},
    second_order=True,
)
