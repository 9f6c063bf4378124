"""An encoder that needs no training: fixed filters for colour, brightness and texture.

Its features describe the look of patches, not their content: similar skin, fur, foliage or sky have similar features.
That is enough for a query made from a region of the same picture (region.py), and there are no weights to distribute.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from exportkit.arr_coc.model.encoder import PATCH_SIZES
from exportkit.arr_coc.model.linear import product
from exportkit.arr_coc.model.texture import TextureMaps, cut_patches
from exportkit.errors import UsageError

HUES = 12
BRIGHTNESSES = (4.0, 17.0, 30.0, 43.0, 56.0, 69.0, 82.0, 95.0)  # L*
BRIGHTNESS_WIDTH = 9.0
FREQUENCIES = 8  # DCT coefficients along a side: 0 to 3.5 cycles per patch
RINGS = ((0.0, 1.5), (1.5, 3.0), (3.0, 5.5), (5.5, 10.0))  # radial bands of DCT coefficients
RING_SCALES = (0.012, 0.0062, 0.0032, 0.0017)  # median amplitudes on photographs, which fall like 1/f
SECTORS = 3  # vertical, oblique, horizontal structure
LARGEST_COEFFICIENT = 128.0  # in units of RING_SCALES; its square fits in a float16
CHROMA_SCALE = 25.0  # of a*, b*
TEXTURE_SCALE = 1.5  # of band amplitudes divided by their medians

# The typical response on photographs is subtracted, so that different patches have opposite features. Otherwise all
# features would lie in a narrow cone. The gains give colour, brightness and texture similar weight in a cosine.
HUE_OFFSET, HUE_GAIN = 0.14, 1.5
BRIGHTNESS_OFFSET, BRIGHTNESS_GAIN = 0.25, 0.9
TEXTURE_OFFSET, TEXTURE_GAIN = 0.4, 1.3


class FilterBank(nn.Module):
    """Fixed filters over CIELAB patches with a side of 14 or 16.

    Each patch has 12 hue responses (rectified, so that a half red and half green patch is not grey), 8 brightness
    responses over its quadrants, and 12 texture responses (root mean squares of DCT coefficients, by spatial frequency
    and orientation). The other 32 features are the means of these over the surrounding 3 x 3 patches.

    Responses are compressed by x / (x + scale) and not by a logarithm or an exponential. Division and square root are
    exactly rounded. A vectorised exponential differs in its last bits from the scalar one at the end of a row, so a
    patch's features would depend on its place in the batch.
    """

    needs_maps = True
    min_rows = 1
    hues: Tensor
    brightnesses: Tensor
    basis: Tensor
    coefficient_scales: Tensor
    band_order: Tensor

    def __init__(self, patch_size: int = 16) -> None:
        super().__init__()
        if patch_size not in PATCH_SIZES:
            raise UsageError(f"patch_size must be 14 or 16, got {patch_size}")
        self.patch_size = patch_size
        self.dim = 2 * (HUES + len(BRIGHTNESSES) + len(RINGS) * SECTORS)
        angles = torch.arange(HUES) * (2 * math.pi / HUES)
        self.register_buffer("hues", torch.stack([angles.cos(), angles.sin()]), persistent=False)
        self.register_buffer("brightnesses", torch.tensor(BRIGHTNESSES).view(-1, 1, 1), persistent=False)
        self.register_buffer("basis", dct_basis(patch_size), persistent=False)
        self.register_buffer("coefficient_scales", ring_scales(), persistent=False)
        bands = texture_bands()
        self.register_buffer("band_order", torch.cat(bands), persistent=False)
        self._band_sizes = [len(band) for band in bands]

    def forward(self, image: Tensor, maps: TextureMaps | None) -> Tensor:
        """Returns features [B, N, 64] of the pixel maps. The image itself is not used."""
        assert maps is not None
        rows, columns = image.shape[2] // self.patch_size, image.shape[3] // self.patch_size
        own = torch.cat([self._colour(maps.lab), self._texture(maps.lab[:, :1])], dim=2)
        grid = own.transpose(1, 2).reshape(own.shape[0], -1, rows, columns)
        around = functional.avg_pool2d(grid, 3, stride=1, padding=1, count_include_pad=False).flatten(2).transpose(1, 2)
        return torch.cat([own, around], dim=2)

    def _colour(self, lab: Tensor) -> Tensor:
        """Returns hue and brightness responses [B, N, 20], each the mean over a patch's four quadrants."""
        quadrants = functional.avg_pool2d(lab, self.patch_size // 2)
        a, b = quadrants[:, 1:2], quadrants[:, 2:3]
        along = a * self.hues[0].view(-1, 1, 1) + b * self.hues[1].view(-1, 1, 1)
        hue = HUE_GAIN * (_compressed(functional.relu(along), CHROMA_SCALE) - HUE_OFFSET)
        distance = (quadrants[:, :1] - self.brightnesses) / BRIGHTNESS_WIDTH
        brightness = BRIGHTNESS_GAIN * (1 / (1 + distance * distance) - BRIGHTNESS_OFFSET)
        return functional.avg_pool2d(torch.cat([hue, brightness], dim=1), 2).flatten(2).transpose(1, 2)

    def _texture(self, luminance: Tensor) -> Tensor:
        """Returns band responses [B, N, 12] of L* [B, 1, H, W]."""
        patches = cut_patches(luminance / 100, self.patch_size).flatten(1, 2)
        batch, count, side, _ = patches.shape
        # Columns, then rows: two small products instead of one with all 64 basis images.
        half = product(patches.reshape(batch, count * side, side), self.basis.t())
        half = half.reshape(batch, count, side, FREQUENCIES).transpose(2, 3).reshape(batch, -1, side)
        coefficients = product(half, self.basis.t()).reshape(batch, count, FREQUENCIES * FREQUENCIES)
        scaled = (coefficients * self.coefficient_scales).clamp(-LARGEST_COEFFICIENT, LARGEST_COEFFICIENT)
        # Sums instead of a product with a matrix of ones and zeros: for fewer than 16 rows, as in a small image, a
        # matrix library computes one product with other last bits than several.
        powers = (scaled * scaled).index_select(2, self.band_order).split(self._band_sizes, dim=2)
        power = torch.stack([band.mean(2) for band in powers], dim=2)
        # The root's slope at 0 is infinite: a flat patch's gradient would be NaN.
        return TEXTURE_GAIN * (_compressed(torch.sqrt(power + 1e-4), TEXTURE_SCALE) - TEXTURE_OFFSET)


def _compressed(amplitude: Tensor, scale: float) -> Tensor:
    """Maps [0, inf) to [0, 1), with one half at `scale`."""
    return amplitude / (amplitude + scale)


def dct_basis(side: int) -> Tensor:
    """Returns the first columns of the orthonormal DCT-II of `side` samples over sqrt(side), float32 [side, 8].

    The square root makes coefficients amplitudes instead of sums, so that they do not depend on the patch size.
    """
    sample = torch.arange(side, dtype=torch.float64).unsqueeze(1)
    frequency = torch.arange(FREQUENCIES, dtype=torch.float64).unsqueeze(0)
    basis = torch.cos(math.pi * (sample + 0.5) * frequency / side) * math.sqrt(2) / side
    basis[:, 0] /= math.sqrt(2)
    return basis.float()


def ring_scales() -> Tensor:
    """Returns 1 / typical amplitude of each DCT coefficient, float32 [64]; 0 for the mean, which is not texture."""
    radius, scales = _radius(), torch.zeros(FREQUENCIES * FREQUENCIES)
    for (low, high), scale in zip(RINGS, RING_SCALES):
        scales[(radius > low) & (radius <= high)] = 1 / scale
    return scales


def texture_bands() -> list[Tensor]:
    """Returns the indices of each band's DCT coefficients, ordered by ring, then by sector."""
    frequency = torch.arange(FREQUENCIES, dtype=torch.float64)
    angle = torch.atan2(frequency.unsqueeze(0), frequency.unsqueeze(1)).flatten()
    sector = (angle / (math.pi / 2) * SECTORS).clamp_max(SECTORS - 1).long()
    radius = _radius()
    return [
        ((radius > low) & (radius <= high) & (sector == index)).nonzero().flatten()
        for low, high in RINGS
        for index in range(SECTORS)
    ]


def _radius() -> Tensor:
    frequency = torch.arange(FREQUENCIES, dtype=torch.float64)
    return torch.hypot(frequency.unsqueeze(1), frequency.unsqueeze(0)).flatten()
