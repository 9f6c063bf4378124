"""Propositional knowing: the information in a patch's features."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from exportkit.contract.operator_spec import OpSpec, Refusal, Sample
from exportkit.ops._autograd import register_no_second_derivative
from exportkit.ops._call import operator
from exportkit.ops._checks import check, check_alike, check_floating, check_rank, check_same_size, shape_of

_compute_entropy = operator("compute_entropy")
_compute_entropy_grad = operator("compute_entropy_grad")


def compute_entropy(features: Tensor, temperature: float = 1.0) -> Tensor:
    """Normalised Shannon entropy of softmax(features / temperature) over the last dimension.

    H = (logsumexp(z) - sum p z) / ln D with z = features / temperature and p = softmax(z); 0 if D = 1.

    Args:
        features: [B, N, D], floating.
        temperature: The softmax's temperature, above 0.

    Returns:
        [B, N] in [0, 1], in the dtype of `features`.

    Raises:
        RuntimeError: An argument has a wrong rank or dtype, D = 0, or temperature <= 0.
    """
    return _compute_entropy(features, temperature)


def compute_entropy_reference(features: Tensor, temperature: float = 1.0) -> Tensor:
    """Computes `compute_entropy` in ATen."""
    width = features.shape[-1]
    z = (features if features.dtype == torch.float64 else features.float()) / temperature
    log_p = torch.log_softmax(z, -1)
    p = log_p.exp()
    nats = -torch.where(p > 0, p * log_p, p).sum(-1)  # 0 log 0 is 0
    return (nats / math.log(width) if width > 1 else nats * 0).to(features.dtype)


def compute_entropy_grad(grad: Tensor, features: Tensor, temperature: float) -> Tensor:
    """Gradient of `compute_entropy`: dH/dx_j = -p_j (ln p_j + H_nats) / (temperature ln D).

    Args:
        grad: [B, N], with the dtype and device of `features`.
        features: [B, N, D].
        temperature: The softmax's temperature, above 0.

    Returns:
        [B, N, D].
    """
    return _compute_entropy_grad(grad, features, temperature)


def compute_entropy_grad_reference(grad: Tensor, features: Tensor, temperature: float) -> Tensor:
    """Computes `compute_entropy_grad` in ATen."""
    width = features.shape[-1]
    z = (features if features.dtype == torch.float64 else features.float()) / temperature
    log_p = torch.log_softmax(z, -1)
    p = log_p.exp()
    nats = -torch.where(p > 0, p * log_p, p).sum(-1, keepdim=True)
    slope = torch.where(p > 0, -p * (log_p + nats), p)
    norm = 1 / (temperature * math.log(width)) if width > 1 else 0.0
    return (grad.unsqueeze(-1) * slope * norm).to(features.dtype)


@torch.library.register_fake("arr_coc::compute_entropy")
def _compute_entropy_fake(features: Tensor, temperature: float = 1.0) -> Tensor:
    op = "compute_entropy"
    check_rank(op, "features", features, 3, "[B, N, D]")
    check_floating(op, "features", features)
    check(features.shape[2] > 0, f"{op}: features must have D >= 1, got shape {shape_of(features)}")
    check(temperature > 0, f"{op}: temperature must be > 0, got {temperature:g}")
    return features.new_empty(features.shape[:2])


@torch.library.register_fake("arr_coc::compute_entropy_grad")
def _compute_entropy_grad_fake(grad: Tensor, features: Tensor, temperature: float) -> Tensor:
    op = "compute_entropy_grad"
    _compute_entropy_fake(features, temperature)
    check_rank(op, "grad", grad, 2, "[B, N]")
    check_alike(op, "features", features, "grad", grad)
    check_same_size(op, "B", "grad", grad.shape[0], "features", features.shape[0])
    check_same_size(op, "N", "grad", grad.shape[1], "features", features.shape[1])
    return features.new_empty(features.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    features, ctx.temperature = inputs
    ctx.save_for_backward(features)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    (features,) = ctx.saved_tensors
    return compute_entropy_grad(grad, features, ctx.temperature), None


torch.library.register_autograd("arr_coc::compute_entropy", _backward, setup_context=_setup_context)
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


def _refusals(device: torch.device) -> Iterable[Refusal]:
    x = torch.randn(2, 3, 4, device=device)
    yield Refusal("rank 2", (x[0],), r"features must be \[B, N, D\], got shape \[3, 4\]")
    yield Refusal("int64", (x.long(),), "features must be float32.* got int64")
    yield Refusal("D = 0", (x[..., :0],), r"D >= 1, got shape \[2, 3, 0\]")
    yield Refusal("temperature 0", (x, 0.0), "temperature must be > 0, got 0")
    yield Refusal("temperature NaN", (x, math.nan), "temperature must be > 0, got nan")


def _grad_refusals(device: torch.device) -> Iterable[Refusal]:
    x, grad = torch.randn(2, 3, 4, device=device), torch.randn(2, 3, device=device)
    yield Refusal("grad of other B", (grad[:1], x, 1.0), "grad has B = 1, features has B = 2")
    yield Refusal("grad of other N", (grad[:, :1], x, 1.0), "grad has N = 1, features has N = 3")
    yield Refusal("grad of other dtype", (grad.double(), x, 1.0), "grad is float64, features is float32")
    yield Refusal("temperature -1", (grad, x, -1.0), "temperature must be > 0, got -1")


SPEC = OpSpec(
    name="compute_entropy",
    wrapper=compute_entropy,
    reference=compute_entropy_reference,
    samples=_samples,
    refusals=_refusals,
    differentiable=("features",),
    dynamic={"features": {0: "B", 1: "N"}},
    autocast="float32",
)
GRAD_SPEC = OpSpec(
    name="compute_entropy_grad",
    wrapper=compute_entropy_grad,
    reference=compute_entropy_grad_reference,
    samples=_grad_samples,
    refusals=_grad_refusals,
    dynamic={"grad": {0: "B", 1: "N"}, "features": {0: "B", 1: "N"}},
)
