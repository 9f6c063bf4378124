"""Models and inputs the tests of this folder share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from exportkit.arr_coc.model import ARRCOC, build, draw_image

FILTERS: dict[str, Any] = {}
FILTERS_14: dict[str, Any] = {"patch_size": 14, "balancer": "learned", "query_dim": 24, "gating": "straight-through"}
VIT: dict[str, Any] = {"encoder": "vit-tiny", "balancer": "learned"}
VIT_14: dict[str, Any] = {
    "encoder": "vit-tiny",
    "patch_size": 14,
    "positions": "interpolated",
    "layer_scale": True,
    "mean_tokens": 100,
}
PIPELINE = [
    "fused_texture",
    "compute_entropy",
    "compute_salience",
    "query_alignment",
    "opponent_balance",
    "top_k_patches",
    "allocate_lod_tokens",
]
"""The operators that the model is made of where it uses no fused form."""

ALL = {"filters": FILTERS, "filters, patch 14": FILTERS_14, "vit": VIT, "vit, patch 14": VIT_14}


def inputs(model: ARRCOC, batch: int, rows: int, columns: int, tokens: int | None = None) -> tuple[Tensor, Tensor]:
    """An image that looks like something, and a random query."""
    patch = model.encoder.patch_size
    generator = torch.Generator().manual_seed(batch + 7 * rows + 11 * columns)
    image = draw_image(batch, rows * patch, columns * patch, generator)
    shape = (batch, model.query_dim) if tokens is None else (batch, tokens, model.query_dim)
    return image, torch.randn(shape, generator=generator)


def shallow(model: ARRCOC, blocks: int = 1) -> ARRCOC:
    """The model with the first blocks of its transformer, if it has one: the others do nothing new, at length."""
    if hasattr(model.encoder, "blocks"):
        model.encoder.blocks = model.encoder.blocks[:blocks]
    return model


def answer(model: ARRCOC, *args: Tensor | None) -> dict[str, Tensor]:
    """The model's outputs, without a graph."""
    with torch.no_grad():
        return model(*args)


__all__ = ["ALL", "FILTERS", "FILTERS_14", "PIPELINE", "VIT", "VIT_14", "answer", "build", "inputs", "shallow"]
