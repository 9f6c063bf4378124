"""texture_statistics against the maps it is means of, over patch sizes of every kind."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from exportkit.arr_coc.ops import fused_texture, texture_statistics


def means_of_the_maps(rgb: torch.Tensor, patch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The composition in float64, with torch's own pooling."""
    lab, sobel_x, sobel_y = fused_texture(rgb.double())
    pooled = [torch.nn.functional.avg_pool2d(m, patch) for m in (lab, (sobel_x**2 + sobel_y**2 + 1e-8).sqrt())]
    return pooled[0], pooled[1]


def assert_means(rgb: torch.Tensor, patch: int, atol: float = 2e-4) -> None:
    colours, edges = texture_statistics(rgb, patch)
    expected_colours, expected_edges = means_of_the_maps(rgb, patch)
    torch.testing.assert_close(colours.double(), expected_colours, rtol=2e-6, atol=atol)
    torch.testing.assert_close(edges.double(), expected_edges, rtol=2e-6, atol=1e-6)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batch=st.integers(1, 3), rows=st.integers(1, 4), columns=st.integers(1, 40), patch=st.integers(1, 40))
@example(batch=5, rows=4, columns=8, patch=56)
@example(batch=1, rows=1, columns=4, patch=112)
def test_any_grid_of_any_patches(device: torch.device, batch: int, rows: int, columns: int, patch: int):
    assert_means(torch.rand(batch, 3, rows * patch, columns * patch, device=device), patch)


@pytest.mark.parametrize("patch", [128, 640, 1031])
def test_a_patch_as_large_as_the_image(device: torch.device, patch: int):
    """Wider than a CUDA block has threads. The image is dark on one side, so that a missed column shows."""
    rgb = torch.rand(2, 3, patch, patch, device=device) * torch.linspace(0, 1, patch, device=device)
    assert_means(rgb, patch)


def test_float64_is_summed_in_float64(device: torch.device):
    rgb = torch.rand(2, 3, 28, 56, dtype=torch.float64, device=device)
    for actual, expected in zip(texture_statistics(rgb, 14), means_of_the_maps(rgb, 14)):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_are_summed_in_float32(device: torch.device, dtype: torch.dtype):
    """The sum of 65536 values near 50 is past float16, and in bfloat16 it stops growing."""
    rgb = torch.rand(1, 3, 256, 512, device=device).to(dtype)
    for actual, expected in zip(texture_statistics(rgb, 256), means_of_the_maps(rgb, 256)):
        torch.testing.assert_close(actual, expected.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=1e-3)


@pytest.mark.parametrize("shape", [(65540, 3, 2, 2), (1, 3, 131080, 2)], ids=["many samples", "many rows"])
def test_sizes_past_one_cuda_grid(device: torch.device, shape: tuple[int, ...]):
    assert_means(torch.rand(shape, device=device), 2)
