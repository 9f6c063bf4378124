"""The mistakes of other implementations that the contract's checks would not find, each as a test that fails on it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from exportkit.arr_coc import ops
from tests.arr_coc.model.model_cases import PIPELINE

ROOT = Path(__file__).parents[3]
PATCHES, WIDTH, PATCH = 6, 16, 16


def inputs_of(name: str, batch: int, device: torch.device, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    """Random arguments of a pipeline operator: a batch of 32 x 48 images, which is 6 patches of 16."""

    def rand(*shape: int) -> torch.Tensor:
        return torch.rand(batch, *shape, device=device).to(dtype)

    def features() -> torch.Tensor:
        return torch.randn(batch, PATCHES, WIDTH, device=device).to(dtype)

    arguments: dict[str, Callable[[], tuple[Any, ...]]] = {
        "fused_texture": lambda: (rand(3, 32, 48),),
        "compute_entropy": lambda: (features(),),
        "compute_salience": lambda: (features(), rand(3, 32, 48) * 100, rand(1, 32, 48), rand(1, 32, 48), PATCH),
        "query_alignment": lambda: (features(), torch.randn(batch, WIDTH, device=device).to(dtype)),
        "opponent_balance": lambda: (rand(PATCHES), rand(PATCHES), rand(PATCHES), rand(3) + 0.1),
    }
    return arguments[name]()


def run(name: str, arguments: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    result = ops.SPECS[name].wrapper(*arguments)
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize(("channel", "share"), [(0, 0.299), (1, 0.587), (2, 0.114)])
def test_each_channel_counts_by_its_share_of_the_luminance(channel: int, share: float, device: torch.device):
    edge = torch.zeros(1, 3, 8, 8, device=device)
    edge[:, channel, :, 4:] = 1
    _, sobel_x, sobel_y = ops.fused_texture(edge)
    expected = torch.zeros_like(sobel_x)
    expected[..., 3:5] = share / 2  # kernel [-1 0 1; -2 0 2; -1 0 1] / 8 on a step
    torch.testing.assert_close(sobel_x, expected)
    torch.testing.assert_close(sobel_y, torch.zeros_like(sobel_y), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("rgb", "lab"),
    [
        ((1.0, 1.0, 1.0), (100.0, 0.0, 0.0)),
        ((0.0, 0.0, 0.0), (0.0, 0.0, 0.0)),
        ((0.5, 0.5, 0.5), (53.389, 0.0, 0.0)),
        ((1.0, 0.0, 0.0), (53.241, 80.093, 67.203)),
        ((0.0, 1.0, 0.0), (87.735, -86.183, 83.180)),
        ((0.0, 0.0, 1.0), (32.297, 79.188, -107.860)),
    ],
)
def test_lab_of_known_colours(rgb: tuple[float, ...], lab: tuple[float, ...], device: torch.device):
    """CIE LAB under D65 of the primaries of sRGB, as colour tables give them."""
    actual, _, _ = ops.fused_texture(torch.tensor(rgb, device=device).view(1, 3, 1, 1).expand(1, 3, 4, 4))
    expected = torch.tensor(lab, device=device).view(1, 3, 1, 1).expand_as(actual)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0.05)


# A bitonic network on a length that is no power of two; shared memory of 8 N bytes.
@pytest.mark.parametrize("patches", [3, 196, 1000, 1023, 4097, 6145, 20000])
def test_top_k_of_any_number_of_patches_is_the_true_top_k(patches: int, device: torch.device):
    scores, features = torch.rand(2, patches, device=device), torch.rand(2, patches, 1, device=device)
    expected = torch.sort(scores, dim=-1, descending=True, stable=True)
    for k in {1, patches // 3, patches}:
        selected, indices = ops.top_k_patches(scores, features, k)
        assert torch.equal(indices, expected.indices[:, :k])
        assert torch.equal(selected, features.gather(1, indices.unsqueeze(-1)))


def test_200_of_the_196_patches_of_a_224_pixel_image_are_refused_by_kernel_and_fake(device: torch.device):
    scores, features = torch.rand(1, 196, device=device), torch.rand(1, 196, 4, device=device)
    with pytest.raises(RuntimeError, match="got k = 200 with N = 196"):
        ops.top_k_patches(scores, features, 200)
    with FakeTensorMode() as mode, pytest.raises(RuntimeError, match="got k = 200 with N = 196"):
        ops.top_k_patches(mode.from_tensor(scores), mode.from_tensor(features), 200)
    _, indices = ops.top_k_patches(scores, features, min(200, 196))
    assert indices.dtype == torch.int64


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


# fminf and fmaxf turn NaN into a number.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", [n for n in PIPELINE if n not in ("top_k_patches", "allocate_lod_tokens")])
def test_nan_stays_nan_in_its_own_sample(name: str, dtype: torch.dtype, device: torch.device):
    arguments = inputs_of(name, 2, device, dtype)
    clean = run(name, arguments)
    tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
    for index in range(len(tensors)):
        poisoned = [t.clone() for t in tensors]
        poisoned[index][1].view(-1)[0] = torch.nan
        results = run(name, (*poisoned, *arguments[len(tensors) :]))
        assert any(result[1].isnan().any() for result in results), f"argument {index}: NaN was lost"
        for result, expected in zip(results, clean):
            assert torch.equal(result[0], expected[0])


def test_nan_comes_last_and_gets_the_smallest_budget(device: torch.device):
    """The two exceptions, which are the contract's."""
    scores = torch.tensor([[torch.nan, -torch.inf, 0.5, 1.0]], device=device)
    _, indices = ops.top_k_patches(scores, torch.rand(1, 4, 1, device=device), 4)
    assert indices.tolist() == [[3, 2, 1, 0]]
    assert ops.allocate_lod_tokens(scores).tolist() == [[64, 64, 232, 400]]


# A second TORCH_LIBRARY for a namespace aborts; a fake registered twice silently replaces the first.
def test_the_namespace_is_only_ever_extended_by_fragments():
    # All of csrc but the C++ runtime, whose namespace is its own and whose library is loaded once.
    for path in sorted((ROOT / "csrc" / "arr_coc").rglob("*.[ch]*")):
        assert not re.search(r"\b(STABLE_)?TORCH_LIBRARY\(", path.read_text()), path.name


def test_every_fake_and_every_gradient_is_registered_once():
    sources = [path.read_text() for path in (ROOT / "exportkit" / "arr_coc" / "ops").glob("*.py")]
    for name in ops.SPECS:
        fakes = re.findall(rf"\bwrapper={name},", "".join(sources))  # a SPEC registers its fake
        assert len(fakes) == 1, name
        gradients = re.findall(rf'register_(?:\w+)\(\s*"(?:arr_coc::)?{name}"', "".join(sources))
        assert len(gradients) <= 1, name


# Architectures: some operators need 8.0; one PTX, of Hopper, serves every other GPU from 9.0 on.
def test_the_build_covers_ampere_to_blackwell_and_what_comes_later():
    (architectures,) = re.findall(r'^RELEASE_ARCHITECTURES = "([^"]+)"', (ROOT / "setup.py").read_text(), re.MULTILINE)
    assert architectures.split(";") == ["8.0", "8.6", "8.9", "9.0+PTX", "10.0", "12.0"]
