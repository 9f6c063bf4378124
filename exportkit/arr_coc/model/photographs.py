"""Photographs from scikit-image's wheel, each with a region for a query, so that the demo works offline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from exportkit.arr_coc.model.region import Region
from exportkit.errors import HostError, UsageError


@dataclass(frozen=True)
class Photograph:
    """A picture and a query about it.

    Attributes:
        pixels: float32 [1, 3, H, W] in [0, 1], H and W multiples of the patch size.
        region: The region to find similar patches for.
        subject: The region in words.
    """

    pixels: Tensor
    region: Region
    subject: str


@dataclass(frozen=True)
class _Entry:
    region: Region  # in the enlarged picture
    subject: str
    enlarge: int = 1


_ENTRIES = {
    "astronaut": _Entry(Region(70, 180, 110, 80), "the astronaut's face"),
    "chelsea": _Entry(Region(205, 285, 85, 110), "one of the cat's eyes", enlarge=2),
    "coffee": _Entry(Region(150, 210, 60, 170), "the coffee in the cup"),
}
PHOTOGRAPHS = tuple(_ENTRIES)

# For queries made from a region: the fit to the query has the largest weight, and budgets favour the best patches.
REGION_MODEL: dict[str, Any] = {
    "encoder": "filters",
    "entropy_weight": 0.2,
    "salience_weight": 0.3,
    "alignment_weight": 0.5,
    "gamma": 3.0,
}
"""Arguments of `build` and `export_spec` for a query made from a region of a photograph."""


def load_photograph(name: str = "astronaut", *, patch_size: int = 16) -> Photograph:
    """Returns one of PHOTOGRAPHS, cropped to whole patches.

    Raises:
        UsageError: There is no photograph of this name.
        HostError: scikit-image is not installed.
    """
    if name not in _ENTRIES:
        raise UsageError(f"photograph must be one of {', '.join(PHOTOGRAPHS)}, got {name!r}")
    try:
        from skimage import data
    except ImportError as error:
        raise HostError(
            "the photographs come with scikit-image, which is not installed",
            hint="Run `pip install 'exportkit[demo]'`.",
        ) from error
    entry = _ENTRIES[name]
    return Photograph(crop_to_patches(getattr(data, name)(), patch_size, entry.enlarge), entry.region, entry.subject)


def crop_to_patches(picture: np.ndarray, patch_size: int, enlarge: int = 1) -> Tensor:
    """Converts uint8 [H, W, 3] to float32 [1, 3, H', W'] in [0, 1], enlarged, then cut at the right and the bottom."""
    pixels = torch.tensor(picture[..., :3]).permute(2, 0, 1).unsqueeze(0).float() / 255
    if enlarge > 1:
        pixels = functional.interpolate(pixels, scale_factor=enlarge, mode="bicubic", align_corners=False).clamp(0, 1)
    height, width = (size // patch_size * patch_size for size in pixels.shape[2:])
    return pixels[:, :, :height, :width].contiguous()
