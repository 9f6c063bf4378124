"""Mean colour and edge strength of every patch of an image, computed without storing pixel maps."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from exportkit.arr_coc.ops._autograd import FOR_INFERENCE, register_no_derivative
from exportkit.arr_coc.ops._operator import ArrCocSpec, Layout, Sample, operator_like
from exportkit.arr_coc.ops._reference import accumulated
from exportkit.arr_coc.ops._salience import patch_means
from exportkit.arr_coc.ops.fused_texture import fused_texture_reference


def texture_statistics_reference(rgb: Tensor, patch_size: int) -> tuple[Tensor, Tensor]:
    """Means over patches of `fused_texture`'s CIE LAB and gradient magnitude.

    These are the pixel statistics that `compute_salience` needs. It reads 12 bytes per pixel (float32); with pixel
    maps, 32 bytes are written and read. It is for inference and has no gradient, unlike the composition.

    Args:
        rgb: Encoded sRGB in [0, 1]; finite values outside are allowed.
        patch_size: The side of a patch in pixels.

    Returns:
        The mean LAB of each patch, and the mean of sqrt(sobel_x^2 + sobel_y^2 + 1e-8). Gradients at a patch's border
        use pixels of the next patch.
    """
    lab, sobel_x, sobel_y = fused_texture_reference(accumulated(rgb))
    magnitudes = torch.sqrt(sobel_x**2 + sobel_y**2 + 1e-8)
    return patch_means(lab, patch_size).to(rgb.dtype), patch_means(magnitudes, patch_size).to(rgb.dtype)


texture_statistics = operator_like(texture_statistics_reference)


register_no_derivative("texture_statistics", FOR_INFERENCE + "fused_texture and means over its maps")


def _samples(device: torch.device, dtype: torch.dtype) -> Iterable[Sample]:
    # (B, h, w, P): the first is exported; then patches of one pixel, of odd and even sides, those that are fast, one
    # wider than a CUDA block's threads, and grids that leave a block partly idle.
    sizes = [(2, 2, 3, 4), (3, 4, 2, 4), (1, 1, 1, 1), (5, 3, 5, 1), (2, 2, 3, 3), (1, 3, 2, 5), (2, 5, 37, 2)]
    sizes += [(5, 2, 19, 14), (2, 3, 16, 16), (1, 1, 67, 16), (1, 2, 1, 131), (2, 1, 2, 128)]
    for batch, rows, columns, patch in [*sizes, (0, 2, 2, 4), (2, 0, 2, 4), (2, 2, 0, 4)]:
        # Beyond [0, 1] on both sides: both pieces of both curves.
        rgb = torch.rand(batch, 3, rows * patch, columns * patch, device=device, dtype=dtype) * 2 - 0.5
        yield Sample(f"rgb {list(rgb.shape)}, P = {patch}", (rgb, patch))
    rgb = torch.rand(2, 3, 8, 12, device=device, dtype=dtype)
    rgb[0, 1, 5, 3] = torch.nan
    rgb[1, 2, 0, 11] = torch.inf
    yield Sample("NaN and infinity", (rgb, 4))


SPEC = ArrCocSpec(
    wrapper=texture_statistics,
    reference=texture_statistics_reference,
    layout=Layout(
        inputs={"rgb": "B 3 H W"},
        outputs=["B 3 H/patch_size W/patch_size", "B 1 H/patch_size W/patch_size"],
        numbers={"patch_size": ">= 1"},
    ),
    samples=_samples,
    tolerances={torch.float32: (1e-4, 3e-4)},  # the same as for fused_texture
    autocast="float32",
)
