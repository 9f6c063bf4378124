"""The mistakes of other implementations that the contract's checks would not find, each as a test that fails on it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from exportkit.arr_coc import ops

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(("channel", "share"), [(0, 0.299), (1, 0.587), (2, 0.114)])
def test_each_channel_counts_by_its_share_of_the_luminance(channel: int, share: float, device: torch.device):
    edge = torch.zeros(1, 3, 8, 8, device=device)
    edge[:, channel, :, 4:] = 1
    _, sobel_x, sobel_y = ops.fused_texture(edge)
    expected = torch.zeros_like(sobel_x)
    expected[..., 3:5] = share / 2  # kernel [-1 0 1; -2 0 2; -1 0 1] / 8 on a step
    torch.testing.assert_close(sobel_x, expected)
    torch.testing.assert_close(sobel_y, torch.zeros_like(sobel_y), rtol=0, atol=1e-6)


# Weights that sum to 1 divided by 3 again; entropy in nats.
def test_the_best_scores_get_the_largest_budget(device: torch.device):
    best = torch.ones(2, 4, device=device)
    for weights in ([0.3, 0.4, 0.3], [3.0, 4.0, 3.0]):
        relevance = ops.opponent_balance(best, best, best, torch.tensor(weights, device=device))
        torch.testing.assert_close(relevance, best)
        # Ones weighed by fractions may miss 1 by a rounding, and 400 tokens by none.
        assert ops.allocate_lod_tokens(relevance).eq(400).all()


def test_entropy_of_many_features_stays_within_one(device: torch.device):
    for width in (2, 64, 1024):
        flat, peaked = torch.zeros(1, 1, width, device=device), torch.zeros(1, 1, width, device=device)
        peaked[..., 0] = 100
        torch.testing.assert_close(ops.compute_entropy(flat), torch.ones(1, 1, device=device))
        torch.testing.assert_close(ops.compute_entropy(peaked), torch.zeros(1, 1, device=device), rtol=0, atol=1e-6)


# A cast to int before the clamp: the largest score wraps round to the smallest budget.
@pytest.mark.parametrize("score", [1.5, 1e10, 1e30, float("inf")])
def test_a_huge_score_gets_the_largest_budget(score: float, device: torch.device):
    scores = torch.tensor([[score, -score, 0.5]], device=device)
    assert ops.allocate_lod_tokens(scores).tolist() == [[400, 64, 232]]
    assert ops.allocate_lod_tokens(scores, 64, 400, 1.0, 64 + 400 + 232).tolist() == [[400, 64, 232]]


# A second TORCH_LIBRARY for a namespace aborts.
def test_the_namespace_is_only_ever_extended_by_fragments():
    # All of csrc but the C++ runtime, whose namespace is its own and whose library is loaded once.
    for path in sorted((ROOT / "csrc" / "arr_coc").rglob("*.[ch]*")):
        assert not re.search(r"\b(STABLE_)?TORCH_LIBRARY\(", path.read_text()), path.name


# Architectures: some operators need 8.0; one PTX, of Hopper, serves every other GPU from 9.0 on.
def test_the_build_covers_ampere_to_blackwell_and_what_comes_later():
    (architectures,) = re.findall(r'^RELEASE_ARCHITECTURES = "([^"]+)"', (ROOT / "setup.py").read_text(), re.MULTILINE)
    assert architectures.split(";") == ["8.0", "8.6", "8.9", "9.0+PTX", "10.0", "12.0"]
