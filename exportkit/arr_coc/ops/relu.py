"""Rectified linear unit."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from exportkit.arr_coc.ops._autograd import register_gradient
from exportkit.arr_coc.ops._operator import ArrCocSpec, Layout, Sample, operator_like


def relu_reference(x: Tensor) -> Tensor:
    """max(x, 0), NaN where x is NaN."""
    return torch.relu(x)


relu = operator_like(relu_reference)


def relu_grad_reference(grad: Tensor, output: Tensor) -> Tensor:
    """Gradient of `relu`: 0 where its result `output` is <= 0, else grad. Like torch's, it passes where that is NaN."""
    return torch.where(output <= 0, 0, grad)


relu_grad = operator_like(relu_grad_reference)


register_gradient("relu", relu_grad)
register_gradient("relu_grad", relu_grad)  # constant in `output`, except where that is 0


def _samples(device: torch.device, dtype: torch.dtype) -> Iterable[Sample]:
    for shape in [(2, 5, 8), (1, 3), (5, 17, 33), (0, 3), (2, 0, 3), (), (2, 8193)]:
        yield Sample(f"shape {list(shape)}", (torch.randn(shape, device=device, dtype=dtype),))
    special = torch.tensor([[torch.nan, torch.inf], [-torch.inf, 0.0], [-0.0, -torch.nan]], device=device, dtype=dtype)
    yield Sample("NaN and infinities", (special,))


def _grad_samples(device: torch.device, dtype: torch.dtype) -> Iterable[Sample]:
    for sample in _samples(device, dtype):
        (x,) = sample.args
        yield Sample(sample.label, (torch.randn_like(x), torch.relu(x)))


SPEC = ArrCocSpec(
    wrapper=relu,
    reference=relu_reference,
    layout=Layout(inputs={"x": "..."}, outputs=["..."]),
    samples=_samples,
    differentiable=("x",),
    second_order=True,
)
GRAD_SPEC = ArrCocSpec(
    wrapper=relu_grad,
    reference=relu_grad_reference,
    layout=Layout(inputs={"output": "...", "grad": "..."}, outputs=["..."]),
    samples=_grad_samples,
    differentiable=("grad",),
    second_order=True,
)
