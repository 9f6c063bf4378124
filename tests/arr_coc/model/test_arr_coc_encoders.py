"""What the two encoders promise of their features."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from exportkit.arr_coc.model import build
from exportkit.arr_coc.model.encoder import VisionTransformer, sincos_positions
from exportkit.arr_coc.model.filters import dct_basis, texture_bands
from exportkit.errors import UsageError

SIDES = [14, 16]


def _filtered(image: Tensor, patch_size: int = 16) -> Tensor:
    return build(patch_size=patch_size).encode(image)[0]


def _cosine(a: Tensor, b: Tensor) -> float:
    return torch.nn.functional.cosine_similarity(a, b, dim=0).item()


def _plain(red: float, green: float, blue: float, side: int) -> Tensor:
    return torch.tensor([red, green, blue]).view(1, 3, 1, 1).expand(1, 3, side, side)


def _grating(side: int, cycles: float, vertical: bool) -> Tensor:
    wave = 0.5 + 0.3 * torch.sin(torch.arange(side) * (2 * math.pi * cycles / 16))
    return (wave.view(1, 1, 1, -1) if vertical else wave.view(1, 1, -1, 1)).expand(1, 3, side, side).contiguous()


@pytest.mark.parametrize("side", SIDES)
def test_dct_filters_are_orthogonal_amplitudes(side: int):
    basis = dct_basis(side).double()
    torch.testing.assert_close(basis.T @ basis, torch.eye(8, dtype=torch.float64) / side, atol=1e-7, rtol=0)
    assert sorted(torch.cat(texture_bands()).tolist()) == list(range(1, 64))  # each but the mean is in one band


@pytest.mark.parametrize("side", SIDES)
def test_alike_colours_have_alike_features_and_opposite_ones_have_not(side: int):
    red, orange, blue = (
        _filtered(_plain(*colour, side), side)[0] for colour in [(0.8, 0.2, 0.2), (0.8, 0.3, 0.2), (0.2, 0.2, 0.8)]
    )
    assert _cosine(red, orange) > 0.9
    assert _cosine(red, blue) < 0.7


def test_textures_differ_by_direction_and_frequency_not_by_phase():
    upright, lying, fine = (
        _filtered(_grating(64, cycles, vertical))[5] for cycles, vertical in [(2, True), (2, False), (3.4, True)]
    )
    moved = _filtered(_grating(64, 2, True).roll(3, dims=3))[5]
    assert _cosine(upright, moved) > 0.98
    assert _cosine(upright, moved) > _cosine(upright, fine) > _cosine(upright, lying)


def test_both_patch_sizes_give_a_texture_similar_features():
    picture = torch.nn.functional.interpolate(torch.rand(1, 3, 40, 40), size=(224, 224), mode="bilinear")
    assert _cosine(_filtered(picture, 14).mean(0), _filtered(picture, 16).mean(0)) > 0.98


def test_features_look_at_a_patch_and_its_neighbours_only():
    image = torch.rand(1, 3, 16 * 5, 16 * 5)
    changed = image.clone()
    changed[:, :, 20:26, 20:26] = 0.1  # inside patch (1, 1)
    differs = (_filtered(image) != _filtered(changed)).any(1).reshape(5, 5)
    assert differs[:3, :3].all()
    assert not differs[3:].any()
    assert not differs[:, 3:].any()


def test_extreme_images_have_finite_features_in_half_precision():
    checkers = (torch.arange(64).view(-1, 1) + torch.arange(64)).remainder(2).expand(1, 3, -1, -1)
    edges = (torch.arange(64) // 5 % 2).view(1, 1, 1, -1).expand(1, 3, 64, -1)
    for image in (checkers, edges, torch.zeros(1, 3, 64, 64), torch.ones(1, 3, 64, 64)):
        assert build().half().encode(image.half()).isfinite().all()


def test_sincos_positions_of_a_patch_do_not_depend_on_the_size_of_the_image():
    small, large = (sincos_positions(*grid, 32, torch.device("cpu")) for grid in [(3, 4), (7, 9)])
    torch.testing.assert_close(small.reshape(3, 4, 32), large.reshape(7, 9, 32)[:3, :4])
    assert len(torch.unique(large, dim=0)) == 63


def test_interpolated_positions_at_their_own_grid_are_the_learned_ones():
    encoder = VisionTransformer("tiny", positions="interpolated", position_grid=5)
    torch.testing.assert_close(encoder._resized_positions(5, 5), encoder.pos_embed[:, 1:])
    assert encoder._resized_positions(4, 9).shape == (1, 36, 192)


@pytest.mark.parametrize(
    ("size", "patch", "millions"), [("tiny", 16, 5.5), ("small", 14, 21.7), ("small", 16, 21.6), ("base", 16, 85.7)]
)
def test_sizes_have_the_parameters_published_ones_have(size: str, patch: int, millions: float):
    with torch.device("meta"):
        encoder = VisionTransformer(size, patch, positions="interpolated")
    count = sum(parameter.numel() for parameter in encoder.parameters())
    assert count / 1e6 == pytest.approx(millions, abs=0.1)


def test_parameters_are_named_as_published_weights_name_them():
    with torch.device("meta"):
        names = set(VisionTransformer("tiny", positions="interpolated", layer_scale=True).state_dict())
    block = ["norm1.weight", "norm1.bias", "attn.qkv.weight", "attn.qkv.bias", "attn.proj.weight", "attn.proj.bias"]
    block += ["ls1.gamma", "norm2.weight", "norm2.bias", "mlp.fc1.weight", "mlp.fc1.bias", "mlp.fc2.weight"]
    block += ["mlp.fc2.bias", "ls2.gamma"]
    top = {"cls_token", "pos_embed", "patch_embed.proj.weight", "patch_embed.proj.bias", "norm.weight", "norm.bias"}
    assert names == top | {f"blocks.{index}.{name}" for index in range(12) for name in block}


def test_patches_are_embedded_as_a_convolution_would():
    embed = VisionTransformer("tiny").patch_embed
    image = torch.rand(2, 3, 64, 80)
    torch.testing.assert_close(embed(image), embed.proj(image).flatten(2).transpose(1, 2), rtol=1e-4, atol=1e-5)


def test_a_position_grid_without_interpolated_positions_is_refused():
    with pytest.raises(UsageError, match="position_grid needs"):
        VisionTransformer("tiny", position_grid=14)
    with pytest.raises(UsageError, match="size must be one of tiny, small, base, got 'giant'"):
        VisionTransformer("giant")
