"""texture_statistics against the maps it is means of, over patch sizes of every kind."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exportkit.arr_coc.ops import compute_salience, fused_texture, texture_statistics


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


@pytest.mark.parametrize("patch", [1, 2, 3, 4, 6, 7, 8, 14, 16, 20, 28, 32, 56, 112, 224])
@pytest.mark.parametrize("batch", [1, 2, 5])
def test_it_is_the_mean_of_fused_textures_maps(device: torch.device, batch: int, patch: int):
    assert_means(torch.rand(batch, 3, 224 // patch * patch, 448 // patch * patch, device=device), patch)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batch=st.integers(1, 3), rows=st.integers(1, 4), columns=st.integers(1, 40), patch=st.integers(1, 40))
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


@pytest.mark.parametrize("offset", [1, 2, 3])
@pytest.mark.parametrize("patch", [4, 14, 16])
def test_a_start_that_is_not_aligned_for_vectors(device: torch.device, patch: int, offset: int):
    shape = (2, 3, 2 * patch, 6 * patch)
    buffer = torch.rand(torch.Size(shape).numel() + offset, device=device)
    assert_means(buffer[offset:].view(shape), patch)


def test_nan_stays_in_its_patch_but_for_the_gradients_beside(device: torch.device):
    rgb = torch.rand(2, 3, 12, 12, device=device)
    rgb[0, 1, 4, 5] = torch.nan  # on the upper border of patch (1, 1)
    colours, edges = texture_statistics(rgb, 4)
    assert colours[0, :, 1, 1].isnan().all()
    assert colours.isnan().sum() == 3
    assert edges[0, 0, 1, 1].isnan()
    assert edges[0, 0, 0, 1].isnan()
    assert edges.isnan().sum() == 2


def test_a_batch_does_not_change_a_sample_where_it_fills_the_machine(device: torch.device):
    """The kernel shares out the rows of a patch otherwise where there are many; the order of the sum stays."""
    for patch in (14, 16, 32):
        rgb = torch.rand(40, 3, 14 * patch, 14 * patch, device=device)
        whole = texture_statistics(rgb, patch)
        for index in (0, 39):
            for a, e in zip(texture_statistics(rgb[index : index + 1], patch), whole):
                assert torch.equal(a[0], e[index])


def test_a_batch_does_not_change_a_sample_whose_patches_are_wide(device: torch.device):
    """Patches of an odd width, a column a thread: wider than the threads that one of few samples would get."""
    rgb = torch.rand(1024, 3, 65, 65, device=device)
    whole = texture_statistics(rgb, 65)
    for index in (0, 1023):
        for a, e in zip(texture_statistics(rgb[index : index + 1], 65), whole):
            assert torch.equal(a[0], e[index])


@pytest.mark.parametrize("shape", [(65540, 3, 2, 2), (1, 3, 131080, 2)], ids=["many samples", "many rows"])
def test_sizes_past_one_cuda_grid(device: torch.device, shape: tuple[int, ...]):
    assert_means(torch.rand(shape, device=device), 2)


def test_it_serves_salience_as_the_maps_do(device: torch.device):
    """Maps that repeat a patch's colour have the same salience of colours as the maps themselves."""
    rgb, features = torch.rand(2, 3, 64, 96, device=device), torch.randn(2, 24, 8, device=device)
    lab, sobel_x, sobel_y = fused_texture(rgb)
    expected = compute_salience(features, lab, sobel_x, sobel_y, 16)
    colours, edges = (m.repeat_interleave(16, 2).repeat_interleave(16, 3) for m in texture_statistics(rgb, 16))
    flat = (edges.square() - 1e-8).clamp(min=0).sqrt()
    torch.testing.assert_close(compute_salience(features, colours, flat, flat * 0, 16), expected, rtol=1e-4, atol=1e-5)
