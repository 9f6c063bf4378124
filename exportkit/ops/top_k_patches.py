"""Attending: the most relevant patches, best first."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from exportkit.contract.operator_spec import OpSpec, Refusal, Sample
from exportkit.ops._autograd import register_no_second_derivative
from exportkit.ops._call import operator
from exportkit.ops._checks import check, check_dtype, check_floating, check_rank, check_same_size
from exportkit.ops._reference import accumulated

_top_k_patches = operator("top_k_patches")
_top_k_patches_grad = operator("top_k_patches_grad")


def top_k_patches(relevance_scores: Tensor, features: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Selects the k patches of each sample with the highest scores, best first.

    Ties go to the lower index, -0 equals +0, and NaN comes last. Gradients flow to `features` but not to
    `relevance_scores`: a model that learns its scores multiplies the selected features by the selected scores.

    Args:
        relevance_scores: [B, N], floating.
        features: [B, N, D], floating; its dtype may differ.
        k: In [0, N].

    Returns:
        The selected features [B, k, D] in the dtype of `features`, and their indices [B, k], int64.

    Raises:
        RuntimeError: An argument has a wrong rank, dtype, device or size, or k is outside [0, N].
    """
    return _top_k_patches(relevance_scores, features, k)


def top_k_patches_reference(relevance_scores: Tensor, features: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Computes `top_k_patches` in ATen."""
    # Ascending order of the negated scores puts NaN last; descending order would put it first. Negation may give a NaN
    # a sign, and a sort by bit pattern would then put it first.
    scores = accumulated(relevance_scores)
    cost = torch.where(scores.isnan(), torch.nan, -scores)
    indices = torch.sort(cost, dim=-1, stable=True).indices[:, :k].contiguous()
    return features.gather(1, indices.unsqueeze(-1).expand(-1, -1, features.shape[2])), indices


def top_k_patches_grad(grad: Tensor, indices: Tensor, num_patches: int) -> Tensor:
    """Gradient of `top_k_patches` with respect to `features`: the rows of `grad` at their indices, zero elsewhere.

    Args:
        grad: [B, k, D], floating, the gradient of the selected features.
        indices: [B, k], int64 in [0, num_patches), each at most once in a sample. The CPU kernel refuses an index out
            of range. The CUDA kernel asserts, because reading the values back would stall the GPU.
        num_patches: N, at least k.

    Returns:
        [B, N, D].
    """
    return _top_k_patches_grad(grad, indices, num_patches)


def top_k_patches_grad_reference(grad: Tensor, indices: Tensor, num_patches: int) -> Tensor:
    """Computes `top_k_patches_grad` in ATen."""
    batch, _, width = grad.shape
    where = indices.unsqueeze(-1).expand(-1, -1, width)
    return grad.new_zeros(batch, num_patches, width).scatter(1, where, grad)


@torch.library.register_fake("arr_coc::top_k_patches")
def _top_k_patches_fake(relevance_scores: Tensor, features: Tensor, k: int) -> tuple[Tensor, Tensor]:
    op = "top_k_patches"
    check_rank(op, "relevance_scores", relevance_scores, 2, "[B, N]")
    check_floating(op, "relevance_scores", relevance_scores)
    check_rank(op, "features", features, 3, "[B, N, D]")
    check_floating(op, "features", features)
    check(features.device == relevance_scores.device, f"{op}: features and relevance_scores must be on one device")
    batch, patches = relevance_scores.shape
    check_same_size(op, "B", "features", features.shape[0], "relevance_scores", batch)
    check_same_size(op, "N", "features", features.shape[1], "relevance_scores", patches)
    out_of_range = f"{op}: k must be in [0, N], got k = {k} with N = {patches}"
    check(k >= 0, out_of_range)
    # The model's k = min(K, N) is at most N for all N. torch does not simplify min(K, N) <= N and would refuse the
    # export for a guard it cannot prove, but it sees that min(min(K, N), N) is the same expression.
    if not statically_known_true(torch.sym_min(k, patches) == k):
        check(k <= patches, out_of_range)
    selected = features.new_empty((batch, k, features.shape[2]))
    return selected, relevance_scores.new_empty((batch, k), dtype=torch.int64)


@torch.library.register_fake("arr_coc::top_k_patches_grad")
def _top_k_patches_grad_fake(grad: Tensor, indices: Tensor, num_patches: int) -> Tensor:
    op = "top_k_patches_grad"
    check_rank(op, "grad", grad, 3, "[B, k, D]")
    check_floating(op, "grad", grad)
    check_rank(op, "indices", indices, 2, "[B, k]")
    check_dtype(op, "indices", indices, torch.int64)
    check(indices.device == grad.device, f"{op}: indices and grad must be on one device")
    batch, k, width = grad.shape
    check_same_size(op, "B", "indices", indices.shape[0], "grad", batch)
    check_same_size(op, "k", "indices", indices.shape[1], "grad", k)
    check(
        num_patches >= k,
        f"{op}: num_patches must be at least k, got num_patches = {num_patches} with k = {k}",
    )
    return grad.new_empty((batch, num_patches, width))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, features, _ = inputs
    ctx.num_patches = features.shape[1]
    ctx.save_for_backward(output[1])


def _backward(ctx: Any, grad: Tensor, _: Any) -> tuple[None, Tensor | None, None]:
    if not ctx.needs_input_grad[1]:
        return None, None, None
    (indices,) = ctx.saved_tensors
    return None, top_k_patches_grad(grad, indices, ctx.num_patches), None


torch.library.register_autograd("arr_coc::top_k_patches", _backward, setup_context=_setup_context)
register_no_second_derivative("top_k_patches_grad")


def _samples(device: torch.device, dtype: torch.dtype) -> Iterable[Sample]:
    sizes = [
        (2, 7, 4, 3),
        (5, 33, 4, 3),
        (1, 5, 3, 5),
        (1, 1, 1, 1),
        (2, 4, 8, 0),
        (0, 3, 4, 2),
        (2, 0, 4, 0),
        (2, 5, 0, 2),
    ]
    # Around powers of two, and the 14 x 14 patches of a 224 x 224 image.
    sizes += [(2, 196, 3, 64), (1, 255, 1, 128), (2, 256, 1, 129), (1, 257, 1, 127), (2, 1000, 2, 200)]
    sizes += [(2, 1025, 1, 1025), (1, 2049, 1, 2049), (2, 5000, 2, 4500)]  # more than one block sorts
    for batch, patches, width, k in sizes:
        scores = torch.rand(batch, patches, device=device, dtype=dtype)
        features = torch.randn(batch, patches, width, device=device, dtype=dtype)
        yield Sample(f"B = {batch}, N = {patches}, D = {width}, k = {k}", (scores, features, k))
    features = torch.randn(2, 9, 3, device=device, dtype=dtype)
    yield Sample("all scores equal", (torch.full((2, 9), 0.5, device=device, dtype=dtype), features, 4))
    values = [0.0, -0.0, torch.nan, -torch.inf, torch.inf, -1.0, -torch.nan, 0.0, torch.inf]
    special = torch.tensor([values, values[::-1]], device=device, dtype=dtype)
    yield Sample("NaN, infinities and both zeros", (special, features, 9))
    yield Sample("the k-th is one of several zeros", (special, features, 4))


def _grad_samples(device: torch.device, dtype: torch.dtype) -> Iterable[Sample]:
    for batch, patches, width, k in [
        (2, 7, 4, 3),
        (5, 7, 4, 6),
        (1, 1, 1, 1),
        (0, 3, 4, 2),
        (2, 4, 3, 0),
        (2, 1000, 5, 999),
    ]:
        grad = torch.randn(batch, k, width, device=device, dtype=dtype)
        indices = torch.rand(batch, patches, device=device).argsort(-1)[:, :k]
        yield Sample(f"B = {batch}, N = {patches}, D = {width}, k = {k}", (grad, indices, patches))


def _refusals(device: torch.device) -> Iterable[Refusal]:
    scores, features = torch.rand(2, 5, device=device), torch.rand(2, 5, 3, device=device)
    yield Refusal("scores of rank 1", (scores[0], features, 2), r"relevance_scores must be \[B, N\], got shape \[5\]")
    yield Refusal("scores of int64", (scores.long(), features, 2), "relevance_scores must be float32.* got int64")
    yield Refusal("features of rank 2", (scores, scores, 2), r"features must be \[B, N, D\], got shape \[2, 5\]")
    yield Refusal("features of int64", (scores, features.long(), 2), "features must be float32.* got int64")
    yield Refusal("other B", (scores[:1], features, 2), "features has B = 2, relevance_scores has B = 1")
    yield Refusal("other N", (scores[:, :4], features, 2), "features has N = 5, relevance_scores has N = 4")
    yield Refusal("k above N", (scores, features, 6), r"k must be in \[0, N\], got k = 6 with N = 5")
    yield Refusal("k below 0", (scores, features, -1), r"k must be in \[0, N\], got k = -1 with N = 5")


def _grad_refusals(device: torch.device) -> Iterable[Refusal]:
    grad, indices = torch.rand(2, 3, 4, device=device), torch.arange(6, device=device).reshape(2, 3)
    yield Refusal("grad of rank 2", (grad[0], indices, 6), r"grad must be \[B, k, D\], got shape \[3, 4\]")
    yield Refusal("grad of int64", (grad.long(), indices, 6), "grad must be float32.* got int64")
    yield Refusal("indices of rank 1", (grad, indices[0], 6), r"indices must be \[B, k\], got shape \[3\]")
    yield Refusal("indices of int32", (grad, indices.int(), 6), "indices must be int64, got int32")
    yield Refusal("other B", (grad, indices[:1], 6), "indices has B = 1, grad has B = 2")
    yield Refusal("other k", (grad, indices[:, :2], 6), "indices has k = 2, grad has k = 3")
    yield Refusal("fewer patches than k", (grad, indices, 2), "at least k, got num_patches = 2 with k = 3")


SPEC = OpSpec(
    name="top_k_patches",
    wrapper=top_k_patches,
    reference=top_k_patches_reference,
    samples=_samples,
    refusals=_refusals,
    differentiable=("features",),
    dynamic={"relevance_scores": {0: "B", 1: "N"}, "features": {0: "B", 1: "N"}},
    autocast=None,
)
GRAD_SPEC = OpSpec(
    name="top_k_patches_grad",
    wrapper=top_k_patches_grad,
    reference=top_k_patches_grad_reference,
    samples=_grad_samples,
    refusals=_grad_refusals,
    dynamic={"grad": {0: "B", 1: "k"}, "indices": {0: "B", 1: "k"}},
)
