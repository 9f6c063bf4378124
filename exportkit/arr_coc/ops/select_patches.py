"""Selection and budgets in one operator for inference: the best patches, gated, with their tokens and positions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from exportkit.arr_coc.ops._autograd import FOR_INFERENCE, register_no_derivative
from exportkit.arr_coc.ops._operator import ArrCocSpec, Layout, Refusal, Sample, operator_like
from exportkit.arr_coc.ops._reference import accumulated
from exportkit.arr_coc.ops.allocate_lod_tokens import allocate_lod_tokens_reference, check_budgets
from exportkit.arr_coc.ops.top_k_patches import check_k, top_k_patches_reference

Selected = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def select_patches_reference(
    relevance_scores: Tensor,
    features: Tensor,
    k: int,
    rows: int,
    columns: int,
    min_tokens: int = 64,
    max_tokens: int = 400,
    gamma: float = 1.0,
    total: int | None = None,
) -> Selected:
    """Selects the k patches with the highest scores, multiplies each by its score, and computes its tokens and centre.

    Patches come in the order of top_k_patches. Their tokens are exactly allocate_lod_tokens(selected scores,
    min_tokens, max_tokens, gamma, total).

    Use it for inference: it has no gradient. To train, call top_k_patches and allocate_lod_tokens.

    Args:
        relevance_scores: One score for each patch, row by row of the grid.
        features: One row for each patch.
        k: In [0, N].
        rows: The grid's rows.
        columns: The grid's columns.
        min_tokens: The tokens of a patch of score 0, >= 0.
        max_tokens: The tokens of a patch of score 1, in [min_tokens, 2^31).
        gamma: The exponent, above 0 and finite.
        total: The tokens of one sample, in [k * min_tokens, k * max_tokens]. k * max_tokens must then be below 2^31.

    Returns:
        The selected features times their scores, rounded to their dtype; their indices, tokens and scores; and their
        centres (y, x) as fractions of the grid.
    """
    kept, indices = top_k_patches_reference(relevance_scores, features, k)
    scores = relevance_scores.gather(1, indices)
    tokens = allocate_lod_tokens_reference(scores, min_tokens, max_tokens, gamma, total)
    # As ATen multiplies half types. Written out, ONNX Runtime has kernels for it in every dtype.
    gated = (accumulated(kept) * accumulated(scores).unsqueeze(-1)).to(features.dtype)
    return gated, indices, tokens, scores, centres(indices, rows, columns)


select_patches = operator_like(select_patches_reference)


def centres(indices: Tensor, rows: int, columns: int) -> Tensor:
    """Returns centres of patches, float32 [..., 2] as (y, x) in (0, 1), for row-major indices in a grid."""
    row = torch.div(indices, columns, rounding_mode="floor")
    y = (row.to(torch.float32) + 0.5) / rows
    x = ((indices - row * columns).to(torch.float32) + 0.5) / columns
    return torch.stack([y, x], dim=-1)


def _check_numbers(
    op: str, relevance_scores: Tensor, features: Tensor, k: int, rows: int, columns: int, **budgets: Any
) -> None:
    check_k(op, relevance_scores, k)
    check_budgets(op, k, **budgets)


register_no_derivative("select_patches", FOR_INFERENCE + "top_k_patches and allocate_lod_tokens")


def _samples(device: torch.device, dtype: torch.dtype) -> Iterable[Sample]:
    def drawn(batch: int, patches: int, width: int) -> tuple[Tensor, Tensor]:
        scores = torch.rand(batch, patches, device=device, dtype=dtype)
        return scores, torch.randn(batch, patches, width, device=device, dtype=dtype)

    sizes = [(2, 3, 4, 4, 5), (1, 3, 4, 4, 5), (5, 3, 11, 5, 33), (1, 1, 5, 3, 5), (1, 1, 1, 1, 1), (2, 2, 2, 8, 0)]
    sizes += [(0, 3, 2, 4, 2), (2, 0, 3, 4, 0), (2, 5, 1, 0, 2)]
    # Around powers of two, and the patches of images of 224, 448 and 1024 pixels a side.
    sizes += [(2, 14, 14, 65, 64), (1, 15, 17, 1, 128), (2, 16, 16, 8, 129), (1, 257, 1, 1, 127)]
    sizes += [(2, 28, 28, 264, 200), (1, 25, 41, 3, 1025), (2, 64, 64, 2, 200)]
    sizes += [(1, 3, 683, 1, 2049), (2, 50, 100, 2, 4500), (1, 160, 128, 4, 9)]  # more than one block selects
    for batch, rows, columns, width, k in sizes:
        numbers = f"B = {batch}, N = {rows} * {columns}, D = {width}, k = {k}"
        scores, features = drawn(batch, rows * columns, width)
        yield Sample(numbers, (scores, features, k, rows, columns))
        yield Sample(f"{numbers}, total", (scores, features, k, rows, columns, 1, 50, 1.5, k * 7))
    scores, features = drawn(3, 42, 8)
    for gamma in (0.5, 2.0, 2.2):
        yield Sample(f"gamma = {gamma}", (scores, features, 13, 6, 7, 0, 255, gamma))
        yield Sample(f"gamma = {gamma}, total", (scores, features, 13, 6, 7, 0, 255, gamma, 1000))
    equal = torch.full((2, 12), 0.5, device=device, dtype=dtype)
    values = [0.0, -0.0, torch.nan, -torch.inf, torch.inf, -1.0, -torch.nan, 0.0, torch.inf, 0.5, -0.0, 1.0]
    special = torch.tensor([values, values[::-1]], device=device, dtype=dtype)
    features = torch.randn(2, 12, 4, device=device, dtype=dtype)
    features[1, 7, 1], features[0, 8, 0] = torch.nan, -torch.inf
    for budgets in [(), (10, 400, 1.0, 500)]:
        ending = ", total" if budgets else ""
        yield Sample(f"all scores equal{ending}", (equal, features, 5, 3, 4, *budgets))
        yield Sample(f"the k-th is one of several zeros{ending}", (special, features, 5, 3, 4, *budgets))
        yield Sample(f"NaN, infinities and both zeros{ending}", (special, features, 12, 3, 4, *budgets))


def _refusals(device: torch.device) -> Iterable[Refusal]:
    given = torch.rand(2, 6, device=device), torch.rand(2, 6, 3, device=device)
    yield Refusal("another grid", (*given, 4, 2, 2), "scores has N = 6, the grid of patches has N = 4; they must be eq")
    yield Refusal("k above N", (*given, 7, 2, 3), r"select_patches: k must be in \[0, N\], got k = 7 with N = 6")
    yield Refusal("k below 0", (*given, -1, 2, 3), r"select_patches: k must be in \[0, N\], got k = -1 with N = 6")
    yield Refusal("min above max", (*given, 5, 2, 3, 9, 8), "select_patches: .* got min_tokens = 9, max_tokens = 8")
    yield Refusal("max of 2^31", (*given, 5, 2, 3, 0, 2**31), "max_tokens must be at most 2147483647, got 2147483648")
    yield Refusal("gamma 0", (*given, 5, 2, 3, 0, 8, 0.0), "gamma must be > 0 and finite, got 0")
    yield Refusal("total too low", (*given, 5, 2, 3, 3, 8, 1.0, 14), r"total must be in .* = \[15, 40\], got 14")
    yield Refusal("total too high", (*given, 5, 2, 3, 3, 8, 1.0, 41), r"total must be in .* = \[15, 40\], got 41")
    yield Refusal("k max of 2^31", (*given, 5, 2, 3, 0, 2**29, 1.0, 7), "got K = 5, max_tokens = 536870912")


SPEC = ArrCocSpec(
    wrapper=select_patches,
    reference=select_patches_reference,
    layout=Layout(
        inputs={"relevance_scores": "B N", "features": "B N D"},
        outputs=["B k D", "B k: int64", "B k: int64", "B k", "B k 2: float32"],
        numbers={"rows": ">= 0", "columns": ">= 0"},
        derived={"N": ("the grid of patches", "rows * columns")},
        further=_check_numbers,
    ),
    static=("D", "N"),  # N is rows * columns
    samples=_samples,
    more_refusals=_refusals,
)
