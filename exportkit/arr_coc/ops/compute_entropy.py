"""Entropy: the information in a patch's features."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from exportkit.arr_coc.ops._autograd import register_gradient, register_no_second_derivative
from exportkit.arr_coc.ops._operator import ArrCocSpec, Layout, Sample, operator_like
from exportkit.arr_coc.ops._reference import accumulated


def compute_entropy_reference(features: Tensor, temperature: float = 1.0) -> Tensor:
    """Normalised Shannon entropy of softmax(features / temperature) over the last dimension.

    H = (logsumexp(z) - sum p z) / ln D with z = features / temperature and p = softmax(z); 0 if D = 1.

    Args:
        features: One row of numbers for each patch.
        temperature: The softmax's temperature.

    Returns:
        Values in [0, 1].
    """
    width = features.shape[-1]
    z = accumulated(features) / temperature
    log_p = torch.log_softmax(z, -1)
    p = log_p.exp()
    nats = -torch.where(p > 0, p * log_p, p).sum(-1)  # 0 log 0 is 0
    return (nats / math.log(width) if width > 1 else nats * 0).to(features.dtype)


compute_entropy = operator_like(compute_entropy_reference)


def compute_entropy_grad_reference(grad: Tensor, features: Tensor, temperature: float) -> Tensor:
    """Gradient of `compute_entropy`: dH/dx_j = -p_j (ln p_j + H_nats) / (temperature ln D)."""
    width = features.shape[-1]
    z = accumulated(features) / temperature
    log_p = torch.log_softmax(z, -1)
    p = log_p.exp()
    nats = -torch.where(p > 0, p * log_p, p).sum(-1, keepdim=True)
    slope = torch.where(p > 0, -p * (log_p + nats), p)
    norm = 1 / (temperature * math.log(width)) if width > 1 else 0.0
    return (grad.unsqueeze(-1) * slope * norm).to(features.dtype)


compute_entropy_grad = operator_like(compute_entropy_grad_reference)

register_gradient("compute_entropy", compute_entropy_grad)
register_no_second_derivative("compute_entropy_grad")


def _samples(device: torch.device, dtype: torch.dtype) -> Iterable[Sample]:
    for shape in [(2, 5, 8), (1, 3, 7), (5, 33, 65), (2, 4, 1), (0, 3, 4), (2, 0, 4), (1, 1, 1025)]:
        yield Sample(f"features {list(shape)}", (torch.randn(shape, device=device, dtype=dtype) * 3,))
    yield Sample("sharp temperature", (torch.randn(2, 4, 16, device=device, dtype=dtype), 0.05))
    yield Sample("one infinite logit", (torch.tensor([[[0.0, -torch.inf, 1.0]]], device=device, dtype=dtype),))


def _grad_samples(device: torch.device, dtype: torch.dtype) -> Iterable[Sample]:
    for sample in _samples(device, dtype):
        features, temperature = (*sample.args, 1.0)[:2]
        grad = torch.randn(features.shape[:2], device=device, dtype=dtype)
        yield Sample(sample.label, (grad, features, temperature))


LAYOUT = Layout(inputs={"features": "B N D"}, outputs=["B N"], least={"D": 1}, numbers={"temperature": "> 0"})
SPEC = ArrCocSpec(
    wrapper=compute_entropy,
    reference=compute_entropy_reference,
    layout=LAYOUT,
    static=("D",),
    samples=_samples,
    differentiable=("features",),
    autocast="float32",
)
GRAD_SPEC = ArrCocSpec(
    wrapper=compute_entropy_grad,
    reference=compute_entropy_grad_reference,
    layout=Layout(after={"compute_entropy": LAYOUT}, inputs={"grad": "B N"}, outputs=["like features"]),
    samples=_grad_samples,
)
