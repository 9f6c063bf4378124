"""Bias and rectified linear unit in one pass over memory."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from exportkit.arr_coc.ops._autograd import register_gradient
from exportkit.arr_coc.ops._operator import ArrCocSpec, Layout, Sample, operator_like
from exportkit.arr_coc.ops._reference import accumulated
from exportkit.arr_coc.ops.scale_bias_relu import scale_bias_relu_grad


def bias_relu_reference(x: Tensor, bias: Tensor) -> Tensor:
    """relu(x + bias), NaN where that is NaN.

    Half types are computed in float32 and rounded once. The gradient is `scale_bias_relu_grad` with a scale of 1, which
    needs only the output.
    """
    return torch.relu(accumulated(x) + accumulated(bias)).to(x.dtype)


bias_relu = operator_like(bias_relu_reference)


register_gradient("bias_relu", scale_bias_relu_grad, scale=1.0)


def _samples(device: torch.device, dtype: torch.dtype) -> Iterable[Sample]:
    for shape in [(2, 5, 8), (1, 3, 7), (5, 33, 65), (0, 3, 4), (2, 0, 4), (2, 3, 0), (5, 1), (1,), (3, 2, 1032)]:
        x, bias = (torch.randn(s, device=device, dtype=dtype) for s in (shape, shape[-1:]))
        yield Sample(f"x {list(shape)}", (x, bias))
    special = torch.tensor([[torch.nan, torch.inf, -torch.inf, 0.0]], device=device, dtype=dtype).expand(2, 4)
    yield Sample("NaN and infinities", (special, torch.zeros(4, device=device, dtype=dtype)))
    yield Sample("infinity less infinity", (special, torch.full((4,), -torch.inf, device=device, dtype=dtype)))


SPEC = ArrCocSpec(
    wrapper=bias_relu,
    reference=bias_relu_reference,
    layout=Layout(inputs={"x": "... D", "bias": "D"}, outputs=["... D"]),
    samples=_samples,
    differentiable=("x", "bias"),
    autocast="first",
    second_order=True,
)
