"""Participatory knowing: how well a patch fits the query."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from exportkit.contract.operator_spec import OpSpec, Refusal, Sample
from exportkit.ops._autograd import register_no_second_derivative
from exportkit.ops._call import operator
from exportkit.ops._checks import check, check_alike, check_dtype, check_floating, check_rank, check_same_size, shape_of
from exportkit.ops._reference import NORM_FLOOR, accumulated, norm, unit

_query_alignment = operator("query_alignment")
_query_alignment_grad = operator("query_alignment_grad")


def query_alignment(features: Tensor, query: Tensor, mask: Tensor | None = None) -> Tensor:
    """(1 + cos) / 2 of each patch's features with the query token that fits best.

    Norms are clamped at 1e-12. If `mask` excludes all tokens of a sample, its alignment is 0 (as if cos = -1) and its
    gradients are zero. Values of masked tokens, even NaN, have no effect.

    The gradient goes to the first token with the maximum. With hats for unit vectors, d cos / d f =
    (q^ - cos f^) / ||f||, and the same for q; if a norm is clamped, q^ / 1e-12.

    Args:
        features: [B, N, D], floating.
        query: [B, D] or [B, T, D] with T >= 1, with the dtype and device of `features`.
        mask: [B, T], bool, true where a token counts; on the device of `features`. Only with a query [B, T, D].

    Returns:
        [B, N] in [0, 1] up to rounding, in the dtype of `features`.

    Raises:
        RuntimeError: An argument has a wrong rank, size, dtype or device; D = 0 or T = 0; a mask with a query [B, D].
    """
    return _query_alignment(features, query, mask)


def _cosines(features: Tensor, query: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns query tokens [B, T, D], zero where masked, and cosines [B, N, T], -inf where masked."""
    tokens = accumulated(query if query.dim() == 3 else query.unsqueeze(1))
    if mask is not None:
        tokens = torch.where(mask.unsqueeze(-1), tokens, 0)
    cosines = unit(accumulated(features)) @ unit(tokens).transpose(1, 2)
    return tokens, cosines if mask is None else cosines.masked_fill(~mask.unsqueeze(1), -torch.inf)


def query_alignment_reference(features: Tensor, query: Tensor, mask: Tensor | None = None) -> Tensor:
    """Computes `query_alignment` in ATen."""
    _, cosines = _cosines(features, query, mask)
    alignment = (1 + cosines.max(-1).values) / 2
    if mask is not None:
        alignment = torch.where(mask.any(-1, keepdim=True), alignment, 0)
    return alignment.to(features.dtype)


def query_alignment_grad(
    grad: Tensor, features: Tensor, query: Tensor, mask: Tensor | None, need_features: bool, need_query: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of `query_alignment`.

    Args:
        grad: [B, N], with the dtype and device of `features`.
        features: [B, N, D].
        query: [B, D] or [B, T, D].
        mask: [B, T], or None.
        need_features: Whether to compute the gradient of `features`. A gradient that is not computed has shape [0].
        need_query: Whether to compute the gradient of `query`.

    Returns:
        Gradients of features and query, each with its argument's shape.
    """
    return _query_alignment_grad(grad, features, query, mask, need_features, need_query)


def query_alignment_grad_reference(
    grad: Tensor, features: Tensor, query: Tensor, mask: Tensor | None, need_features: bool, need_query: bool
) -> tuple[Tensor, Tensor]:
    """Computes `query_alignment_grad` in ATen."""
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


@torch.library.register_fake("arr_coc::query_alignment")
def _query_alignment_fake(features: Tensor, query: Tensor, mask: Tensor | None = None) -> Tensor:
    op = "query_alignment"
    check_rank(op, "features", features, 3, "[B, N, D]")
    check_floating(op, "features", features)
    check(features.shape[2] > 0, f"{op}: features must have D >= 1, got shape {shape_of(features)}")
    check(query.dim() in (2, 3), f"{op}: query must be [B, D] or [B, T, D], got shape {shape_of(query)}")
    check_alike(op, "features", features, "query", query)
    check_same_size(op, "B", "query", query.shape[0], "features", features.shape[0])
    check_same_size(op, "D", "query", query.shape[-1], "features", features.shape[2])
    if query.dim() == 3:
        check(query.shape[1] > 0, f"{op}: query must have T >= 1, got shape {shape_of(query)}")
    if mask is not None:
        check(query.dim() == 3, f"{op}: mask needs a query [B, T, D], got query of shape {shape_of(query)}")
        check_rank(op, "mask", mask, 2, "[B, T]")
        check_dtype(op, "mask", mask, torch.bool)
        check(mask.device == features.device, f"{op}: mask and features must be on one device")
        check_same_size(op, "B", "mask", mask.shape[0], "query", query.shape[0])
        check_same_size(op, "T", "mask", mask.shape[1], "query", query.shape[1])
    return features.new_empty(features.shape[:2])


@torch.library.register_fake("arr_coc::query_alignment_grad")
def _query_alignment_grad_fake(
    grad: Tensor, features: Tensor, query: Tensor, mask: Tensor | None, need_features: bool, need_query: bool
) -> tuple[Tensor, Tensor]:
    op = "query_alignment_grad"
    _query_alignment_fake(features, query, mask)
    check_rank(op, "grad", grad, 2, "[B, N]")
    check_alike(op, "features", features, "grad", grad)
    check_same_size(op, "B", "grad", grad.shape[0], "features", features.shape[0])
    check_same_size(op, "N", "grad", grad.shape[1], "features", features.shape[1])
    return (
        features.new_empty(features.shape if need_features else (0,)),
        query.new_empty(query.shape if need_query else (0,)),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    features, query, mask = ctx.saved_tensors
    needs = ctx.needs_input_grad[:2]
    gradients = query_alignment_grad(grad, features, query, mask, *needs)
    return *(g if need else None for g, need in zip(gradients, needs)), None


torch.library.register_autograd("arr_coc::query_alignment", _backward, setup_context=_setup_context)
register_no_second_derivative("query_alignment_grad")


def _samples(device: torch.device, dtype: torch.dtype) -> Iterable[Sample]:
    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    def mask(batch: int, tokens: int) -> Tensor:
        """Random, but the first token of every sample counts."""
        kept = torch.rand(batch, tokens, device=device) < 0.6
        return kept.index_fill(1, torch.tensor([0], device=device), True)

    for batch, count, tokens, width in [(2, 6, 4, 8), (1, 3, 1, 7), (5, 33, 9, 8), (0, 3, 2, 4), (2, 0, 2, 4)]:
        args = normal(batch, count, width), normal(batch, tokens, width), mask(batch, tokens)
        yield Sample(f"B, N, T, D = {batch}, {count}, {tokens}, {width}, masked", args)
    for batch, count, tokens, width in [(2, 5, 3, 6), (1, 7, 17, 65), (3, 130, 2, 264), (2, 9, 8, 1030)]:
        unmasked = normal(batch, count, width), normal(batch, tokens, width)
        yield Sample(f"B, N, T, D = {batch}, {count}, {tokens}, {width}", unmasked)
    for batch, count, width in [(2, 5, 6), (1, 1, 1), (5, 300, 40), (0, 2, 3)]:
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
    x, q = torch.randn(2, 5, 4, device=device), torch.randn(2, 3, 4, device=device)
    mask = torch.ones(2, 3, device=device, dtype=torch.bool)
    yield Refusal("rank 2", (x[0], q), r"features must be \[B, N, D\], got shape \[5, 4\]")
    yield Refusal("int64", (x.long(), q), "features must be float32.* got int64")
    yield Refusal("D = 0", (x[..., :0], q[..., :0]), r"D >= 1, got shape \[2, 5, 0\]")
    yield Refusal("query of rank 1", (x, q[0, 0]), r"query must be \[B, D\] or \[B, T, D\], got shape \[4\]")
    yield Refusal("query of other dtype", (x, q.double()), "query is float64, features is float32")
    yield Refusal("query of other B", (x, q[:1]), "query has B = 1, features has B = 2")
    yield Refusal("query of other D", (x, q[..., :3]), "query has D = 3, features has D = 4")
    yield Refusal("T = 0", (x, q[:, :0]), r"query must have T >= 1, got shape \[2, 0, 4\]")
    yield Refusal("mask without tokens", (x, q[:, 0], mask), r"mask needs a query \[B, T, D\], got query of shape")
    yield Refusal("mask of rank 1", (x, q, mask[0]), r"mask must be \[B, T\], got shape \[3\]")
    yield Refusal("mask of floats", (x, q, mask.float()), "mask must be bool, got float32")
    yield Refusal("mask of other B", (x, q, mask[:1]), "mask has B = 1, query has B = 2")
    yield Refusal("mask of other T", (x, q, mask[:, :2]), "mask has T = 2, query has T = 3")


def _grad_refusals(device: torch.device) -> Iterable[Refusal]:
    x, q, grad = (torch.randn(shape, device=device) for shape in [(2, 5, 4), (2, 3, 4), (2, 5)])
    yield Refusal("grad of other B", (grad[:1], x, q, None, True, True), "grad has B = 1, features has B = 2")
    yield Refusal("grad of other N", (grad[:, :1], x, q, None, True, True), "grad has N = 1, features has N = 5")
    yield Refusal("grad of other dtype", (grad.half(), x, q, None, True, True), "grad is float16, features is float32")
    yield Refusal("T = 0", (grad, x, q[:, :0], None, True, True), "query must have T >= 1")


_DYNAMIC = {"features": {0: "B", 1: "N"}, "query": {0: "B", 1: "T"}, "mask": {0: "B", 1: "T"}}
SPEC = OpSpec(
    name="query_alignment",
    wrapper=query_alignment,
    reference=query_alignment_reference,
    samples=_samples,
    refusals=_refusals,
    differentiable=("features", "query"),
    dynamic=_DYNAMIC,
    autocast="float32",
)
GRAD_SPEC = OpSpec(
    name="query_alignment_grad",
    wrapper=query_alignment_grad,
    reference=query_alignment_grad_reference,
    samples=_grad_samples,
    refusals=_grad_refusals,
    dynamic={"grad": {0: "B", 1: "N"}, **_DYNAMIC},
)
