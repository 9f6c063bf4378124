"""Selection: the most relevant patches, best first."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from exportkit.arr_coc.ops._autograd import register_no_second_derivative
from exportkit.arr_coc.ops._operator import (
    ArrCocSpec,
    Layout,
    Refusal,
    Sample,
    check,
    operator_like,
    statically_known_true,
)
from exportkit.arr_coc.ops._reference import accumulated


def top_k_patches_reference(relevance_scores: Tensor, features: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Selects the k patches of each sample with the highest scores, best first.

    Ties go to the lower index, -0 equals +0, and NaN comes last. Gradients flow to `features` but not to
    `relevance_scores`: a model that learns its scores multiplies the selected features by the selected scores.

    Args:
        relevance_scores: One score for each patch.
        features: One row for each patch; its dtype may differ.
        k: In [0, N].

    Returns:
        The selected features, and their indices.
    """
    # Ascending order of the negated scores puts NaN last; descending order would put it first. Negation may give a NaN
    # a sign, and a sort by bit pattern would then put it first.
    scores = accumulated(relevance_scores)
    cost = torch.where(scores.isnan(), torch.nan, -scores)
    indices = torch.sort(cost, dim=-1, stable=True).indices[:, :k].contiguous()
    return features.gather(1, indices.unsqueeze(-1).expand(-1, -1, features.shape[2])), indices


top_k_patches = operator_like(top_k_patches_reference)


def top_k_patches_grad_reference(grad: Tensor, indices: Tensor, num_patches: int) -> Tensor:
    """Gradient of `top_k_patches` with respect to `features`: the rows of `grad` at their indices, zero elsewhere.

    Args:
        grad: The gradient of the selected features.
        indices: In [0, num_patches), each at most once in a sample. The CPU kernel refuses an index out of range. The
            CUDA kernel asserts, because reading the values back would stall the GPU.
        num_patches: N, at least k.
    """
    batch, _, width = grad.shape
    where = indices.unsqueeze(-1).expand(-1, -1, width)
    return grad.new_zeros(batch, num_patches, width).scatter(1, where, grad)


top_k_patches_grad = operator_like(top_k_patches_grad_reference)


def check_k(op: str, relevance_scores: Tensor, k: int, **_: Any) -> None:
    """Checks that k is in [0, N]. It may be symbolic."""
    patches = relevance_scores.shape[1]
    out_of_range = (op, ": k must be in [0, N], got k = ", k, " with N = ", patches)
    check(k >= 0, *out_of_range)
    # The model's k = min(K, N) is at most N for all N. torch does not simplify min(K, N) <= N and would refuse the
    # export for a guard it cannot prove, but it sees that min(min(K, N), N) is the same expression.
    if not statically_known_true(torch.sym_min(k, patches) == k):
        check(k <= patches, *out_of_range)


def _check_num_patches(op: str, grad: Tensor, num_patches: int, **_: Tensor) -> None:
    k = grad.shape[1]
    check(num_patches >= k, op, ": num_patches must be at least k, got num_patches = ", num_patches, " with k = ", k)


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
    sizes = [(2, 7, 4, 3), (5, 33, 4, 3), (1, 5, 3, 5), (1, 1, 1, 1), (2, 4, 8, 0), (0, 3, 4, 2), (2, 0, 4, 0)]
    sizes += [(2, 5, 0, 2)]
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
    sizes = [(2, 7, 4, 3), (5, 7, 4, 6), (1, 1, 1, 1), (0, 3, 4, 2), (2, 4, 3, 0), (2, 1000, 5, 999)]
    for batch, patches, width, k in sizes:
        grad = torch.randn(batch, k, width, device=device, dtype=dtype)
        indices = torch.rand(batch, patches, device=device).argsort(-1)[:, :k]
        yield Sample(f"B = {batch}, N = {patches}, D = {width}, k = {k}", (grad, indices, patches))


def _refusals(device: torch.device) -> Iterable[Refusal]:
    scores, features = torch.rand(2, 5, device=device), torch.rand(2, 5, 3, device=device)
    yield Refusal("k above N", (scores, features, 6), r"k must be in \[0, N\], got k = 6 with N = 5")
    yield Refusal("k below 0", (scores, features, -1), r"k must be in \[0, N\], got k = -1 with N = 5")


def _grad_refusals(device: torch.device) -> Iterable[Refusal]:
    grad, indices = torch.rand(2, 3, 4, device=device), torch.arange(6, device=device).reshape(2, 3)
    yield Refusal("fewer patches than k", (grad, indices, 2), "at least k, got num_patches = 2 with k = 3")


SPEC = ArrCocSpec(
    wrapper=top_k_patches,
    reference=top_k_patches_reference,
    layout=Layout(
        inputs={"relevance_scores": "B N", "features": "B N D: floating"},
        outputs=["B k D: like features", "B k: int64"],
        further=check_k,
    ),
    static=("D",),
    samples=_samples,
    more_refusals=_refusals,
    differentiable=("features",),
    autocast=None,
)
GRAD_SPEC = ArrCocSpec(
    wrapper=top_k_patches_grad,
    reference=top_k_patches_grad_reference,
    layout=Layout(
        inputs={"grad": "B k D", "indices": "B k: int64"}, outputs=["B num_patches D"], further=_check_num_patches
    ),
    samples=_grad_samples,
    more_refusals=_grad_refusals,
)
