"""A query made from a region of the image itself: "more like this"."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from exportkit.arr_coc.model.texture import patch_grid
from exportkit.errors import UsageError

if TYPE_CHECKING:
    from exportkit.arr_coc.model.pipeline import ARRCOC


class Region(NamedTuple):
    """A rectangle of an image, in pixels."""

    top: int
    left: int
    height: int
    width: int


def region_weights(region: Region, rows: int, columns: int, patch_size: int) -> Tensor:
    """Computes the share of a region in each patch, row by row: float32 [rows * columns], with sum 1.

    Parts outside the image are ignored. UsageError: the region lies outside the image.
    """
    overlap_y = _overlap(region.top, region.height, rows, patch_size)
    overlap_x = _overlap(region.left, region.width, columns, patch_size)
    area = (overlap_y.unsqueeze(1) * overlap_x).flatten()
    if not area.sum() > 0:
        size = f"{columns * patch_size} x {rows * patch_size}"
        raise UsageError(f"region {tuple(region)} (top, left, height, width) lies outside the image of {size} pixels")
    return area / area.sum()


def region_query(model: ARRCOC, image: Tensor, region: Region) -> Tensor:
    """Returns the mean [B, D] of the model's features over a region, weighted by area, the same for each image.

    The model has no query projection, because the query has the features' space.

    Raises:
        UsageError: The region lies outside the image, or the model projects its query.
        InputError: The image, [B, 3, H, W] in [0, 1], has a wrong shape.
    """
    if model.query_projection is not None:
        raise UsageError(
            f"the model takes queries of width {model.query_dim} and projects them to {model.encoder.dim}; "
            "a region's features are already in that space",
            hint="Build the model without query_dim.",
        )
    grid = patch_grid(image, model.encoder.patch_size)
    features = model.encode(image)
    weights = region_weights(region, *grid, model.encoder.patch_size).to(features)
    return torch.einsum("n,bnd->bd", weights, features)


def _overlap(start: int, length: int, count: int, patch_size: int) -> Tensor:
    low = torch.arange(count) * patch_size
    return (torch.clamp(low + patch_size, max=start + length) - torch.clamp(low, min=start)).clamp_min(0).float()
