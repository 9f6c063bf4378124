"""Colour and edge maps of images, and their division into patches. Nothing here is learned."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from exportkit.arr_coc.ops.fused_texture import fused_texture
from exportkit.errors import InputError


class TextureMaps(NamedTuple):
    """Pixel maps of an image: CIELAB `lab` [B, 3, H, W], luminance slopes `sobel_x` and `sobel_y` [B, 1, H, W]."""

    lab: Tensor
    sobel_x: Tensor
    sobel_y: Tensor


def texture_maps(image: Tensor) -> TextureMaps:
    """Returns the maps of `image` [B, 3, H, W], sRGB-encoded in [0, 1], in its dtype. It reads the pixels once."""
    return TextureMaps(*fused_texture(image))


def patch_grid(image: Tensor, patch_size: int) -> tuple[int, int]:
    """Returns the rows and columns of patches in an image, floating [B, 3, H, W].

    InputError: it is not a batch of images, or a size is not a positive multiple of the patch size.
    """
    shape = tuple(image.shape)
    if len(shape) != 4 or shape[1] != 3:
        raise InputError(f"image must be [B, 3, H, W], got shape {list(shape)}")
    if not image.is_floating_point():
        raise InputError(f"image must be floating, with values in [0, 1], got {image.dtype}; divide bytes by 255 first")
    for name, size in (("height", shape[2]), ("width", shape[3])):
        if size < patch_size or size % patch_size != 0:
            said = f"image {name} must be a positive multiple of the patch size {patch_size}, got {size}"
            raise InputError(said, hint="Crop, pad or resize the image.")
    return shape[2] // patch_size, shape[3] // patch_size


def cut_patches(maps: Tensor, patch_size: int) -> Tensor:
    """Cuts [B, C, H, W] into [B, N, C, P, P], patches in row-major order.

    The copy is laid out patch by patch, so that plain matrix products follow for any H and W.
    """
    batch, channels, height, width = maps.shape
    rows, columns = height // patch_size, width // patch_size
    grid = maps.reshape(batch, channels, rows, patch_size, columns, patch_size)
    return grid.permute(0, 2, 4, 1, 3, 5).reshape(batch, rows * columns, channels, patch_size, patch_size)
