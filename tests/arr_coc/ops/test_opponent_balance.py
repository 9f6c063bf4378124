"""opponent_balance against what its formula says by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from exportkit.arr_coc.ops import opponent_balance
from exportkit.arr_coc.ops.opponent_balance import opponent_balance_reference

unit = st.floats(-0.5, 1.5, width=32)


@settings(deadline=None, max_examples=50)
@given(hnp.arrays(np.float64, (3, 2, 4), elements=unit), hnp.arrays(np.float64, (2, 3), elements=st.floats(0.125, 4)))
def test_is_the_clamped_weighted_mean(scores, weights):
    e, s, a = (torch.from_numpy(x) for x in scores)
    for inverted in (False, True):
        actual = opponent_balance(e, s, a, torch.from_numpy(weights), inverted).numpy()
        three = np.stack([1 - scores[0] if inverted else scores[0], scores[1], scores[2]], -1)
        expected = [[np.average(three[b, n], weights=weights[b]) for n in range(4)] for b in range(2)]
        np.testing.assert_allclose(actual, np.clip(expected, 0, 1), atol=1e-12)


def test_weights_that_sum_to_zero_give_what_the_formula_gives(device):
    x = torch.tensor([[0.25, 0.5]], device=device, requires_grad=True)
    zeros = torch.zeros(3, device=device, requires_grad=True)
    scores = opponent_balance(x, x, x, zeros)
    assert scores.isnan().all()
    for gradient in torch.autograd.grad(scores.sum(), (x, zeros)):
        assert gradient.isnan().all()
    half = torch.tensor([0.25], device=device)
    opposed = torch.tensor([1.0, -1.0, 0.0], device=device)
    assert opponent_balance(2 * half[None], half[None], half[None], opposed).item() == 1.0  # +inf, clamped
    assert opponent_balance(half[None], 2 * half[None], half[None], opposed).item() == 0.0


@pytest.mark.parametrize("function", [opponent_balance, opponent_balance_reference])
def test_gradient_is_zero_where_clamped_and_whole_at_the_ends(function, device):
    """torch.clamp gives the ends themselves the gradient up to 2.13, and none from 2.14 on."""
    e = torch.tensor([[-0.5, 0.0, 0.5, 1.0, 1.5]], device=device, requires_grad=True)
    weights = torch.tensor([1.0, 0.0, 0.0], device=device)
    (gradient,) = torch.autograd.grad(function(e, e.detach(), e.detach(), weights).sum(), e)
    assert gradient.tolist() == [[0, 1, 1, 1, 0]]
