"""Alignment: how well a patch fits the query."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from exportkit.arr_coc.ops._autograd import register_gradient, register_no_second_derivative
from exportkit.arr_coc.ops._operator import ArrCocSpec, Layout, Refusal, Sample, normals, operator_like
from exportkit.arr_coc.ops._reference import NORM_FLOOR, accumulated, norm, unit


def _cosines(features: Tensor, query: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns query tokens [B, T, D], zero where masked, and cosines [B, N, T], -inf where masked."""
    tokens = accumulated(query if query.dim() == 3 else query.unsqueeze(1))
    if mask is not None:
        tokens = torch.where(mask.unsqueeze(-1), tokens, 0)
    cosines = unit(accumulated(features)) @ unit(tokens).transpose(1, 2)
    return tokens, cosines if mask is None else cosines.masked_fill(~mask.unsqueeze(1), -torch.inf)


def query_alignment_reference(features: Tensor, query: Tensor, mask: Tensor | None = None) -> Tensor:
    """(1 + cos) / 2 of each patch's features with the query token that fits best.

    Norms are clamped at 1e-12. If `mask` excludes all tokens of a sample, its alignment is 0 (as if cos = -1) and its
    gradients are zero. Values of masked tokens, even NaN, have no effect.

    The gradient goes to the first token with the maximum. With hats for unit vectors, d cos / d f =
    (q^ - cos f^) / ||f||, and the same for q; if a norm is clamped, q^ / 1e-12.

    Args:
        features: One row for each patch.
        query: One row, or one for each of T tokens.
        mask: True where a token counts. Only with a query of tokens.

    Returns:
        Values in [0, 1] up to rounding.
    """
    _, cosines = _cosines(features, query, mask)
    alignment = (1 + cosines.max(-1).values) / 2
    if mask is not None:
        alignment = torch.where(mask.any(-1, keepdim=True), alignment, 0)
    return alignment.to(features.dtype)


query_alignment = operator_like(query_alignment_reference)


def query_alignment_grad_reference(
    grad: Tensor, features: Tensor, query: Tensor, mask: Tensor | None, need_features: bool, need_query: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of `query_alignment`."""
    x = accumulated(features)
    tokens, cosines = _cosines(features, query, mask)
    best = cosines.max(-1, keepdim=True)
    index = best.indices.expand(-1, -1, x.shape[2])
    slope = (accumulated(grad) / 2).unsqueeze(-1)
    of_features, of_query = features.new_empty(0), query.new_empty(0)
    if need_features:
        length = norm(x)
        along = torch.where(length >= NORM_FLOOR, best.values * unit(x), 0)
        of_features = slope * (unit(tokens).gather(1, index) - along) / length.clamp(min=NORM_FLOOR)
        if mask is not None:
            of_features = torch.where(mask.any(-1)[:, None, None], of_features, 0)
        of_features = of_features.to(features.dtype)
    if need_query:
        length = norm(tokens)
        of_unit = torch.zeros_like(tokens).scatter_add(1, index, slope * unit(x))
        along = (of_unit * unit(tokens)).sum(-1, keepdim=True) * unit(tokens)
        of_query = (of_unit - torch.where(length >= NORM_FLOOR, along, 0)) / length.clamp(min=NORM_FLOOR)
        if mask is not None:
            of_query = torch.where(mask.unsqueeze(-1), of_query, 0)
        of_query = of_query.reshape(query.shape).to(query.dtype)
    return of_features, of_query


query_alignment_grad = operator_like(query_alignment_grad_reference)

register_gradient("query_alignment", query_alignment_grad)
register_no_second_derivative("query_alignment_grad")


def _samples(device: torch.device, dtype: torch.dtype) -> Iterable[Sample]:
    normal = normals(device, dtype)

    def mask(batch: int, tokens: int) -> Tensor:
        """Random, but the first token of every sample counts."""
        kept = torch.rand(batch, tokens, device=device) < 0.6
        return kept.index_fill(1, torch.tensor([0], device=device), True)

    masked = [(2, 6, 4, 8), (1, 3, 1, 7), (5, 33, 9, 8), (3, 30, 1, 16), (0, 3, 2, 4), (2, 0, 2, 4)]
    for batch, count, tokens, width in masked:
        args = normal(batch, count, width), normal(batch, tokens, width), mask(batch, tokens)
        yield Sample(f"B, N, T, D = {batch}, {count}, {tokens}, {width}, masked", args)
    for batch, count, tokens, width in [(2, 5, 3, 6), (1, 7, 17, 65), (3, 130, 2, 264), (2, 9, 8, 1030)]:
        unmasked = normal(batch, count, width), normal(batch, tokens, width)
        yield Sample(f"B, N, T, D = {batch}, {count}, {tokens}, {width}", unmasked)
    for batch, count, width in [(2, 5, 6), (1, 1, 1), (5, 300, 40), (0, 2, 3), (2, 70, 1024), (2, 9, 1032)]:
        yield Sample(f"B, N, D = {batch}, {count}, {width}", (normal(batch, count, width), normal(batch, width)))
    nothing = torch.tensor([[False, True, True], [False, False, False]], device=device)
    yield Sample("a sample without a token", (normal(2, 5, 4), normal(2, 3, 4), nothing))
    yield Sample("large values", (normal(2, 5, 600) * 300, normal(2, 3, 600) * 300))
    holes = normal(2, 5, 4).index_fill(1, torch.tensor([2], device=device), torch.nan)
    yield Sample("NaN in a row and in a masked token", (holes, normal(2, 3, 4) + holes[:, :3], nothing))


def _grad_samples(device: torch.device, dtype: torch.dtype) -> Iterable[Sample]:
    for index, sample in enumerate(_samples(device, dtype)):
        features, query, mask = (*sample.args, None)[:3]
        grad = torch.randn(features.shape[:2], device=device, dtype=dtype)
        needs = (index % 4 != 1, index % 4 != 2)
        yield Sample(sample.label, (grad, features, query, mask, *needs))


def _refusals(device: torch.device) -> Iterable[Refusal]:
    x, q = torch.randn(2, 5, 4, device=device), torch.randn(2, 4, device=device)
    mask = torch.ones(2, 3, device=device, dtype=torch.bool)
    yield Refusal("mask without tokens", (x, q, mask), r"mask needs a query \[B, T, D\], got query of shape")


LAYOUT = Layout(
    inputs={"features": "B N D", "query": "B D | B T D", "mask": "query.B query.T: bool"},
    outputs=["B N"],
    least={"D": 1, "T": 1},
)
SPEC = ArrCocSpec(
    wrapper=query_alignment,
    reference=query_alignment_reference,
    layout=LAYOUT,
    static=("D",),
    samples=_samples,
    more_refusals=_refusals,
    differentiable=("features", "query"),
    autocast="float32",
)
GRAD_SPEC = ArrCocSpec(
    wrapper=query_alignment_grad,
    reference=query_alignment_grad_reference,
    layout=Layout(
        after={"query_alignment": LAYOUT},
        inputs={"grad": "B N"},
        outputs=["like features if need_features", "like query if need_query"],
    ),
    samples=_grad_samples,
)
