"""query_alignment against cosines computed one by one, and the rules for masks, ties, zeros and NaN."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exportkit.arr_coc.ops import query_alignment, query_alignment_grad


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(1, 5), st.integers(1, 11), st.integers(1, 40))
def test_is_the_best_cosine_of_the_tokens_that_count(seed, batch, count, tokens, width):
    rng = np.random.default_rng(seed)
    x, q = rng.normal(size=(batch, count, width)), rng.normal(size=(batch, tokens, width))
    mask = rng.random((batch, tokens)) < 0.5
    actual = query_alignment(*(torch.from_numpy(a) for a in (x, q, mask))).numpy()
    for b in range(batch):
        for n in range(count):
            cosines = [x[b, n] @ t / np.linalg.norm(x[b, n]) / np.linalg.norm(t) for t in q[b][mask[b]]]
            np.testing.assert_allclose(actual[b, n], (1 + max(cosines, default=-1)) / 2, atol=1e-12)


def test_no_token_gives_zero_and_zero_gradients_whatever_the_tokens_hold(device):
    x = torch.randn(2, 5, 6, device=device).requires_grad_()
    q = torch.full((2, 3, 6), torch.nan, device=device)
    q[0, 1] = torch.randn(6, device=device)
    q.requires_grad_()
    mask = torch.tensor([[False, True, False], [False, False, False]], device=device)
    alignment = query_alignment(x, q, mask)
    assert alignment[0].gt(0).all()
    assert alignment[1].eq(0).all()
    of_x, of_q = torch.autograd.grad(alignment.sum(), (x, q))
    assert of_x[0].isfinite().all()
    assert of_x[1].eq(0).all()
    assert of_q[0, 1].ne(0).any()
    assert of_q[~mask].eq(0).all()


@pytest.mark.parametrize(("first", "again"), [(0, 1), (0, 4), (3, 8), (2, 7), (7, 8)])
def test_the_gradient_goes_to_the_first_of_equal_tokens(first, again, device):
    q = torch.randn(2, 9, 33, device=device)
    x = torch.randn(2, 3, 33, device=device)
    q[:, first] = q[:, again] = x.mean(1) * 2  # closer to every row than a random token
    q.requires_grad_()
    query_alignment(x, q).sum().backward()
    best = torch.nn.functional.cosine_similarity(x.unsqueeze(2), q.detach().unsqueeze(1), dim=-1).argmax(-1)
    assert ((best == first) | (best == again)).any(1).all()
    assert q.grad[:, first].ne(0).any(-1).all()
    assert q.grad[:, again].eq(0).all()


def test_zero_rows_and_zero_tokens_are_at_a_right_angle_to_everything(device):
    x, q = torch.zeros(1, 2, 4, device=device), torch.tensor([[3.0, 0, 0, 4.0]], device=device)
    assert query_alignment(x, q).eq(0.5).all()
    assert query_alignment(x + 1, q * 0).eq(0.5).all()
    of_x, _ = query_alignment_grad(torch.ones(1, 2, device=device), x, q, None, True, False)
    torch.testing.assert_close(of_x[0, 0], torch.tensor([0.6, 0, 0, 0.8], device=device) / 2e-12)


@pytest.mark.parametrize("scale", [1e-11, 1e-13])
def test_gradients_of_short_vectors_follow_the_clamp(scale, device):
    """Above the clamp the cosine does not depend on the length; below it, it grows with it."""
    x = (torch.randn(1, 3, 8, device=device, dtype=torch.float64) * scale).requires_grad_()
    q = (torch.randn(1, 2, 8, device=device, dtype=torch.float64) * scale).requires_grad_()
    units = [torch.nn.functional.normalize(t, dim=-1, eps=1e-12) for t in (x, q)]
    expected = torch.autograd.grad(((1 + (units[0] @ units[1].mT).amax(-1)) / 2).sum(), (x, q))
    for a, e in zip(torch.autograd.grad(query_alignment(x, q).sum(), (x, q)), expected):
        torch.testing.assert_close(a, e, rtol=1e-9, atol=0)


@pytest.mark.parametrize("width", [65, 72])
@pytest.mark.parametrize("tokens", [9, 33, 70])
def test_many_rows_and_many_tokens(tokens, width, device):
    """On CUDA a tiled product, whose tiles depend on how many rows there are; the bits do not."""
    x, q = torch.randn(5, 3500, width, device=device), torch.randn(5, tokens, width, device=device)
    mask = torch.rand(5, tokens, device=device) < 0.8
    mask[2] = False
    alignment = query_alignment(x, q, mask)
    exact = query_alignment(x.double(), q.double(), mask)
    torch.testing.assert_close(alignment.double(), exact, rtol=0, atol=1e-5)
    assert torch.equal(query_alignment(x[1:2], q[1:2], mask[1:2])[0], alignment[1])
    x[3, 7, 5] = torch.nan
    assert query_alignment(x, q, mask).isnan().nonzero().tolist() == [[3, 7]]
