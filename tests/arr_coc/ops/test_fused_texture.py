"""fused_texture against independent colour and convolution code, at its borders, and its gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from exportkit.arr_coc.ops import fused_texture, lab_to_rgb_grad, sobel_grad
from exportkit.arr_coc.ops.fused_texture import LUMA, fused_texture_reference, lab_to_rgb_grad_reference

SOBEL = torch.tensor([[-1.0, 0, 1], [-2, 0, 2], [-1, 0, 1]], dtype=torch.float64) / 8


def sobel_by_conv2d(rgb: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross-correlation, in float64, with a replicated border."""
    luma = (rgb.double() * rgb.new_tensor(LUMA, dtype=torch.float64).view(1, 3, 1, 1)).sum(1, keepdim=True)
    padded, kernel = F.pad(luma, (1, 1, 1, 1), mode="replicate"), SOBEL.to(rgb.device)
    return F.conv2d(padded, kernel[None, None]), F.conv2d(padded, kernel.T[None, None])


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1.5e-4), (torch.float64, 1e-11)])
def test_lab_is_that_of_scikit_image(device: torch.device, dtype: torch.dtype, atol: float):
    color = pytest.importorskip("skimage.color")
    rgb = torch.rand(2, 3, 64, 100, dtype=dtype, device=device)
    expected = color.rgb2lab(rgb.double().cpu().numpy(), channel_axis=1)
    torch.testing.assert_close(fused_texture(rgb)[0].double().cpu(), torch.from_numpy(expected), rtol=0, atol=atol)


def test_every_grey_level_of_eight_bits_is_neutral(device: torch.device):
    """A luminance from the green channel, or LAB without the white point, colours grey."""
    grey = (torch.arange(256, dtype=torch.float64, device=device) / 255).expand(1, 3, 1, 256)
    lightness, a, b = fused_texture(grey)[0].unbind(1)
    assert lightness.min().abs() < 1e-4
    assert (lightness.max() - 100).abs() < 1e-3
    assert lightness.diff().min() > 0
    assert max(a.abs().max(), b.abs().max()) < 6e-3  # the matrix's six digits


RANGES = [(0.0, 1.0), (-1.0, 2.0), (0.0, 1e-3), (1.0, 10.0), (100.0, 1000.0), (1e4, 1e6), (1e9, 1e12)]


@pytest.mark.slow_but("*-0.0-1.0")
@pytest.mark.parametrize(("low", "high"), RANGES)
def test_lab_is_as_accurate_as_atens_float32(device: torch.device, low: float, high: float):
    """Also far beyond [0, 1], where a logarithm's relative error is that of a large exponent."""
    rgb = torch.rand(2, 3, 500, 600, device=device) * (high - low) + low
    exact = fused_texture_reference(rgb.double())[0]
    errors = [(lab - exact).abs().amax((0, 2, 3)) for lab in (fused_texture(rgb)[0], fused_texture_reference(rgb)[0])]
    # f is at most that of the brightest value, and rounded; a is 500 times a difference of two of them.
    rounding = 1e-7 * 500 * (exact[:, 0].abs().max() + 16) / 116
    assert (errors[0] <= errors[1] + rounding).all(), errors


@pytest.mark.slow_but("*-0.0-1.0")
@pytest.mark.parametrize(("low", "high"), RANGES)
def test_the_gradient_of_lab_is_as_accurate_as_atens_float32(device: torch.device, low: float, high: float):
    rgb = torch.rand(2, 3, 300, 400, device=device) * (high - low) + low
    grad = torch.randn_like(rgb)
    exact = lab_to_rgb_grad_reference(rgb.double(), grad.double())
    errors = [(f(rgb, grad) - exact).abs().max() for f in (lab_to_rgb_grad, lab_to_rgb_grad_reference)]
    assert errors[0] <= 1.5 * errors[1] + 1e-6 * exact.abs().max(), errors


@pytest.mark.parametrize(
    "size", [(1, 1), (1, 2), (2, 1), (1, 300), (300, 1), (2, 2), (3, 3), (4, 256), (5, 257), (25, 260), (9, 516)]
)
@pytest.mark.parametrize("batch", [1, 2, 5])
def test_sobel_is_a_convolution_with_a_replicated_border(device: torch.device, batch: int, size: tuple[int, int]):
    rgb = torch.rand(batch, 3, *size, device=device)
    _, sobel_x, sobel_y = fused_texture(rgb)
    for actual, expected in zip((sobel_x, sobel_y), sobel_by_conv2d(rgb)):
        torch.testing.assert_close(actual.double(), expected, rtol=0, atol=2e-7)


def test_a_constant_image_has_no_edges_at_all(device: torch.device):
    """Exactly: every pixel's luma is rounded alike, in the tile as in its ring, also around a large offset."""
    for value in (0.1, 0.7, 1000.3):
        rgb = torch.tensor([value, value / 3, value / 7], device=device).view(1, 3, 1, 1).expand(2, 3, 37, 261)
        _, sobel_x, sobel_y = fused_texture(rgb)
        assert not sobel_x.any()
        assert not sobel_y.any()


def test_an_edge_under_a_large_offset_keeps_its_height(device: torch.device):
    rgb = torch.full((1, 3, 8, 8), 1000.0, device=device)
    rgb[..., 4:] += 1
    torch.testing.assert_close(fused_texture(rgb)[1][0, 0, 4, 3:5].cpu(), torch.full((2,), 0.5), rtol=0, atol=2e-4)


def test_nan_stays_where_it_is_and_beside(device: torch.device):
    rgb = torch.rand(2, 3, 9, 12, device=device)
    rgb[0, 1, 4, 6] = torch.nan
    lab, sobel_x, sobel_y = fused_texture(rgb)
    for image, count in ((lab, 3), (sobel_x, 6), (sobel_y, 6)):  # a kernel of 3 x 3 with three zeros
        assert image.isnan().sum() == count
        assert not image[1].isnan().any()
    gradient = lab_to_rgb_grad(rgb, torch.ones_like(rgb))
    assert gradient[0, :, 4, 6].isnan().all()
    assert gradient.isnan().sum() == 3


def test_infinity_is_infinitely_light(device: torch.device):
    rgb = torch.full((1, 3, 1, 4), torch.inf, device=device)
    assert (fused_texture(rgb)[0][:, 0] == torch.inf).all()
    huge = torch.full((1, 3, 1, 4), 1e30, device=device)  # its power is past float32
    assert (fused_texture(huge)[0][:, 0] == torch.inf).all()


@pytest.mark.parametrize("shape", [(65540, 3, 1, 2), (1, 3, 524300, 1)], ids=["many samples", "many rows"])
def test_sizes_past_one_cuda_grid(device: torch.device, shape: tuple[int, ...]):
    rgb = torch.rand(shape, device=device)
    actual, expected = fused_texture(rgb), fused_texture_reference(rgb.double())
    for a, e, atol in zip(actual, expected, (3e-4, 1e-6, 1e-6)):
        torch.testing.assert_close(a.double(), e, rtol=1e-4, atol=atol)
    grad = torch.randn(2, shape[0], 1, *shape[2:], device=device)
    expected_grad = sobel_grad(*grad.cpu().double())
    torch.testing.assert_close(sobel_grad(*grad).cpu().double(), expected_grad, rtol=0, atol=1e-6)
    torch.testing.assert_close(
        lab_to_rgb_grad(rgb, torch.ones_like(rgb)).double(),
        lab_to_rgb_grad_reference(rgb.double(), torch.ones_like(rgb).double()),
        rtol=1e-4,
        atol=1e-2,
    )


# --- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "size", [(1, 1), (1, 2), (2, 1), (1, 9), (9, 1), (2, 2), (4, 256), (17, 131), (8, 512), (9, 516)]
)
def test_sobel_grad_is_the_adjoint_of_sobel(device: torch.device, size: tuple[int, int]):
    """<Sobel(u), g> = <u, adjoint(g)>, and the whole gradient equals that of the convolution."""
    rgb = torch.rand(2, 3, *size, dtype=torch.float64, device=device, requires_grad=True)
    grad_x, grad_y = torch.randn(2, 2, 1, *size, dtype=torch.float64, device=device)
    (expected,) = torch.autograd.grad(sobel_by_conv2d(rgb), rgb, (grad_x, grad_y))
    adjoint = sobel_grad(grad_x, grad_y)
    for channel, weight in enumerate(LUMA):
        torch.testing.assert_close(weight * adjoint[:, 0], expected[:, channel], rtol=0, atol=1e-12)


@pytest.mark.parametrize("used", [(0,), (1,), (2,), (1, 2), (0, 2), (0, 1, 2)], ids=str)
def test_only_what_is_needed_is_computed(device: torch.device, used: tuple[int, ...], monkeypatch: pytest.MonkeyPatch):
    module = __import__("exportkit.arr_coc.ops.fused_texture", fromlist=["_"])
    called = []
    for name in ("lab_to_rgb_grad", "sobel_grad"):
        function = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, n=name, f=function: (called.append(n), f(*a))[1])
    rgb = torch.rand(2, 3, 5, 7, dtype=torch.float64, device=device, requires_grad=True)
    outputs, references = fused_texture(rgb), fused_texture_reference(rgb)
    upstream = [torch.randn_like(output) for output in outputs]
    (actual,) = torch.autograd.grad(sum((outputs[i] * upstream[i]).sum() for i in used), rgb)
    (expected,) = torch.autograd.grad(sum((references[i] * upstream[i]).sum() for i in used), rgb)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)
    assert called == ["sobel_grad"] * (1 in used or 2 in used) + ["lab_to_rgb_grad"] * (0 in used)
