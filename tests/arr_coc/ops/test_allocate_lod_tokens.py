"""allocate_lod_tokens against its definition in exact rational arithmetic, and what it promises for every input."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exportkit.arr_coc import ops
from tests.drawn import examples


def allot(weights: list[int], low: int, high: int, total: int) -> list[int]:
    """The definition: raise the water level, then round by largest remainder."""
    spread, extra = high - low, total - low * len(weights)
    full: set[int] = set()
    while True:
        others = [i for i in range(len(weights)) if i not in full]
        rest, weight = extra - spread * len(full), sum(weights[i] for i in others)
        shares = {i: Fraction(rest * weights[i], weight) if weight else Fraction(rest, len(others)) for i in others}
        above = {i for i, share in shares.items() if share > spread}
        if not above:
            break
        full |= above
    tokens = [low + (spread if i in full else shares[i].__floor__()) for i in range(len(weights))]
    by_remainder = sorted(others, key=lambda i: (shares[i].__floor__() - shares[i], i))
    for i in by_remainder[: total - sum(tokens)]:
        tokens[i] += 1
    return tokens


@st.composite
def calls(draw: st.DrawFn) -> tuple[list[int], int, int, int]:
    """Weights in 256ths, which are exact in every dtype once the highest is 256."""
    weights = draw(st.lists(st.integers(0, 256), min_size=1, max_size=30))
    if any(weights) and draw(st.booleans()):
        weights = [w // (1 + i * i) for i, w in enumerate(weights)]  # steep: many become full one by one
    weights[0] = 256 if any(weights) else 0
    low = draw(st.integers(0, 50))
    high = low + draw(st.integers(0, 300))
    return weights, low, high, draw(st.integers(low * len(weights), high * len(weights)))


@settings(deadline=None, max_examples=examples(400))
@given(calls())
def test_the_allotment_is_the_definition(call: tuple[list[int], int, int, int]):
    weights, low, high, total = call
    scores = torch.tensor([weights]) / 256
    assert ops.allocate_lod_tokens(scores, low, high, 1.0, total)[0].tolist() == allot(weights, low, high, total)


@settings(deadline=None, max_examples=examples(200))
@given(st.lists(st.floats(width=32), min_size=1, max_size=40), st.floats(0.05, 20), st.data())
def test_every_total_is_met_within_the_bounds_and_in_the_order_of_the_scores(
    values: list[float], gamma: float, data: st.DataObject
):
    low = data.draw(st.integers(0, 100))
    high = low + data.draw(st.integers(0, 400))
    total = data.draw(st.integers(low * len(values), high * len(values)))
    scores = torch.tensor([values])
    tokens = ops.allocate_lod_tokens(scores, low, high, gamma, total)
    assert tokens.sum() == total
    assert low <= tokens.min()
    assert tokens.max() <= high
    assert torch.equal(tokens, ops.SPECS["allocate_lod_tokens"].reference(scores, low, high, gamma, total))
    clamped = torch.nan_to_num(scores[0], nan=0.0).clamp(0, 1).double()
    weights = ((clamped / clamped.max().clamp(min=1e-300)).pow(gamma) * 2**32).round()
    ranked = sorted(zip(weights.tolist(), tokens[0].tolist()))
    assert all(below[1] <= above[1] for below, above in pairwise(ranked))


def test_tokens_do_not_depend_on_the_dtype(device: torch.device):
    scores = torch.rand(4, 200, device=device).to(torch.bfloat16)
    for gamma in (1.0, 0.5, 2.2):
        for total in (None, 200 * 150):
            expected = ops.allocate_lod_tokens(scores, 64, 400, gamma, total)
            for dtype in (torch.float32, torch.float64):
                assert torch.equal(ops.allocate_lod_tokens(scores.to(dtype), 64, 400, gamma, total), expected)


@pytest.mark.cuda
def test_tokens_do_not_depend_on_the_device():
    scores = torch.rand(64, 1024, dtype=torch.float64)
    for gamma in (1.0, 0.5, 0.7, 2.2):
        for total in (None, 1024 * 70, 1024 * 250):
            on_cpu = ops.allocate_lod_tokens(scores, 64, 400, gamma, total)
            assert torch.equal(ops.allocate_lod_tokens(scores.cuda(), 64, 400, gamma, total).cpu(), on_cpu)


def test_the_largest_allotment_does_not_overflow(device: torch.device):
    scores = torch.tensor([[1.0, 1.0, 0.5, 2.0**-32]], device=device, dtype=torch.float64)
    high = (2**31 - 1) // 4
    for total in (0, 1, high, 2 * high + 1, 3 * high, 4 * high):
        tokens = ops.allocate_lod_tokens(scores, 0, high, 1.0, total)
        assert tokens.sum() == total
        assert torch.equal(tokens, ops.SPECS["allocate_lod_tokens"].reference(scores, 0, high, 1.0, total))


def test_a_total_that_follows_the_number_of_patches_exports(device: torch.device):
    class Budget(torch.nn.Module):
        def forward(self, scores: torch.Tensor) -> torch.Tensor:
            return ops.allocate_lod_tokens(scores, 64, 400, 1.0, scores.shape[1] * 160)

    dynamic = {0: torch.export.Dim("b", min=1, max=64), 1: torch.export.Dim("k", min=1, max=4096)}
    program = torch.export.export(Budget(), (torch.rand(2, 20, device=device),), dynamic_shapes=(dynamic,))
    for shape in [(1, 1), (3, 196)]:
        scores = torch.rand(shape, device=device)
        assert torch.equal(program.module()(scores), Budget()(scores))
