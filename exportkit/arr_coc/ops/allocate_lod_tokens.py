"""Budgeting: the number of tokens for each selected patch, its level of detail."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from exportkit.arr_coc.ops._operator import (
    ArrCocSpec,
    Layout,
    Refusal,
    Sample,
    check,
    operator_like,
    statically_known_true,
)

MAX_TOKENS = 2**31 - 1
"""The limit for one patch, and with a total for one sample, so that the exact allocation fits int64."""

_POWER_STEPS = 2.0**48
_WEIGHT_ONE = 2.0**32


def allocate_lod_tokens_reference(
    scores: Tensor, min_tokens: int = 64, max_tokens: int = 400, gamma: float = 1.0, total: int | None = None
) -> Tensor:
    """Tokens for each patch by its score: min + floor((max - min) s^gamma + 1/2), s = clamp(score, 0, 1), NaN as 0.

    With `total`, the tokens of each sample sum to it exactly. Every patch gets min_tokens. The rest is shared in
    proportion to s^gamma. A patch that reaches max_tokens is full, and the others share its surplus (a water level).
    Whole tokens come first, then one more for the largest remainders, ties to the lower index. Patches of weight 0 get
    only the surplus of full patches, in equal parts.

    The same scores give the same tokens on every device and in every dtype. s^gamma is computed in float64 and rounded
    to multiples of 2^-48; with a total, to weights that are multiples of 2^-32 of the sample's highest. Everything else
    is exact in integers. A patch never gets fewer tokens than one of lower weight. Not differentiable.

    Args:
        scores: One score for each of K patches.
        min_tokens: The tokens of a patch of score 0, >= 0.
        max_tokens: The tokens of a patch of score 1, in [min_tokens, 2^31).
        gamma: The exponent, above 0 and finite; above 1 it favours the patches with the highest scores.
        total: The tokens of one sample, in [K * min_tokens, K * max_tokens]. K * max_tokens must then be below 2^31.
    """
    s = scores.double()
    s = torch.where(s > 0, s, 0.0).clamp(max=1.0)
    spread, count = max_tokens - min_tokens, scores.shape[1]
    if total is None or count == 0:
        power = s if gamma == 1 else torch.floor(s.pow(gamma) * _POWER_STEPS + 0.5) / _POWER_STEPS
        return min_tokens + torch.floor(power * spread + 0.5).long()
    highest = s.amax(-1, keepdim=True)
    ratio = s / torch.where(highest > 0, highest, 1.0)
    weight = torch.floor((ratio if gamma == 1 else ratio.pow(gamma)) * _WEIGHT_ONE + 0.5).long()

    # The level at which an element of weight v is just full gives spread * sum min(w, v) / v tokens to all. It is full
    # if that is at most the available number. In descending order the sum is rank * v plus the lower weights.
    extra = total - count * min_tokens
    descending = weight.sort(-1, descending=True).values
    rank = torch.arange(1, count + 1, device=scores.device)
    lower = descending.sum(-1, keepdim=True) - descending.cumsum(-1)
    reached = (descending > 0) & (spread * (rank * descending + lower) <= extra * descending)
    lowest_full = torch.where(reached, descending, 2**62).amin(-1, keepdim=True)
    full = weight >= lowest_full

    rest = extra - spread * full.sum(-1, keepdim=True)
    part = torch.where(full, 0, weight)
    part = torch.where(part.sum(-1, keepdim=True) > 0, part, (weight == 0).long())
    whole = part.sum(-1, keepdim=True).clamp(min=1)
    share = torch.div(rest * part, whole, rounding_mode="floor")
    remainder = rest * part - share * whole
    missing = rest - share.sum(-1, keepdim=True)
    order = remainder.sort(dim=-1, descending=True, stable=True).indices
    place = torch.zeros_like(order).scatter(-1, order, (rank - 1).expand_as(order))
    return min_tokens + torch.where(full, spread, share + (place < missing).long())


allocate_lod_tokens = operator_like(allocate_lod_tokens_reference)


def check_budgets(op: str, count: int, min_tokens: int, max_tokens: int, gamma: float, total: int | None) -> None:
    """Checks the numbers for `count` patches a sample, which may be symbolic."""
    given = f"got min_tokens = {min_tokens}, max_tokens = {max_tokens}"
    out_of_order = f"{op}: 0 <= min_tokens <= max_tokens must hold, {given}"
    check(min_tokens >= 0, out_of_order)
    check(min_tokens <= max_tokens, out_of_order)
    check(max_tokens <= MAX_TOKENS, f"{op}: max_tokens must be at most {MAX_TOKENS}, got {max_tokens}")
    check(gamma > 0 and math.isfinite(gamma), f"{op}: gamma must be > 0 and finite, got {gamma:g}")
    if total is None:
        return
    # A symbolic K has no known bound; the kernel still refuses a K that is too large.
    too_many = statically_known_true(count * max_tokens > MAX_TOKENS)
    limit = f"{op}: with a total, K * max_tokens must be at most {MAX_TOKENS}, got K = "
    check(not too_many, limit, count, f", max_tokens = {max_tokens}")
    lowest, highest = count * min_tokens, count * max_tokens
    out_of_range = f"{op}: total must be in [K * min_tokens, K * max_tokens] = [{lowest}, {highest}], got {total}"
    check(lowest <= total, out_of_range)
    check(total <= highest, out_of_range)


def _samples(device: torch.device, dtype: torch.dtype) -> Iterable[Sample]:
    for shape in [(2, 5), (5, 33), (1, 1), (0, 3), (2, 0), (1, 2049)]:
        yield Sample(f"scores {list(shape)}", (torch.rand(shape, device=device, dtype=dtype),))
    scores = torch.rand(5, 196, device=device, dtype=dtype)
    for gamma in (0.5, 2.0, 2.2, 1e-3):
        yield Sample(f"gamma = {gamma}", (scores, 64, 400, gamma))
        yield Sample(f"gamma = {gamma} with a total", (scores, 64, 400, gamma, 196 * 160))
    # 0.25^0.5 and 0.5^2 put a patch exactly between two budgets: a pow that is off by one bit loses a token.
    halves = torch.tensor([[0.0, 0.25, 0.5, 0.75, 1.0]], device=device, dtype=dtype)
    for gamma in (0.5, 2.0, 3.0):
        yield Sample(f"budgets that end in a half, gamma = {gamma}", (halves, 0, 255, gamma))
    values = [-1.0, -0.0, torch.nan, torch.inf, -torch.inf, 2.0, 0.5, 6e4]
    special = torch.tensor([values, values[::-1]], device=device, dtype=dtype)
    yield Sample("outside [0, 1]", (special,))
    yield Sample("outside [0, 1] with a total", (special, 10, 20, 1.0, 133))
    yield Sample("all scores 0", (torch.zeros(2, 7, device=device, dtype=dtype), 3, 9, 1.0, 40))
    yield Sample("all scores equal", (torch.full((2, 7), 0.3, device=device, dtype=dtype), 3, 9, 1.0, 40))
    steep = torch.logspace(0, -9, 40, device=device, dtype=torch.float32).to(dtype)[torch.randperm(40)].expand(2, 40)
    for total in (40, 41, 100, 799, 2000, 3999, 4000):
        yield Sample(f"steep scores, total = {total}", (steep, 1, 100, 1.0, total))
    yield Sample("no spread", (scores, 5, 5, 1.0, 980))
    yield Sample("total of no patches", (scores[:, :0], 5, 9, 1.0, 0))
    for total in (2500 * 3, 2500 * 7 + 1, 2500 * 50 - 1):
        many = torch.rand(2, 2500, device=device, dtype=dtype)
        yield Sample(f"more patches than threads, total = {total}", (many, 3, 50, 1.5, total))


def _refusals(device: torch.device) -> Iterable[Refusal]:
    scores = torch.rand(2, 5, device=device)
    yield Refusal("min above max", (scores, 9, 8), "must hold, got min_tokens = 9, max_tokens = 8")
    yield Refusal("min below 0", (scores, -1, 8), "must hold, got min_tokens = -1, max_tokens = 8")
    yield Refusal("max of 2^31", (scores, 0, 2**31), "max_tokens must be at most 2147483647, got 2147483648")
    for gamma in (0.0, -1.0, math.inf, math.nan):
        yield Refusal(f"gamma {gamma}", (scores, 0, 8, gamma), f"gamma must be > 0 and finite, got {gamma:g}")
    yield Refusal("total too low", (scores, 3, 8, 1.0, 14), r"total must be in .* = \[15, 40\], got 14")
    yield Refusal("total too high", (scores, 3, 8, 1.0, 41), r"total must be in .* = \[15, 40\], got 41")
    yield Refusal("K max of 2^31", (scores, 0, 2**29, 1.0, 7), "got K = 5, max_tokens = 536870912")


SPEC = ArrCocSpec(
    wrapper=allocate_lod_tokens,
    reference=allocate_lod_tokens_reference,
    layout=Layout(
        inputs={"scores": "B K"},
        outputs=["B K: int64"],
        further=lambda op, scores, **numbers: check_budgets(op, scores.shape[1], **numbers),
    ),
    samples=_samples,
    more_refusals=_refusals,
)
