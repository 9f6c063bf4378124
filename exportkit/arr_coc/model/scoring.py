"""Scores each patch in three ways: by its entropy, its salience, and its alignment with the query."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

from exportkit.arr_coc.model.texture import TextureMaps
from exportkit.arr_coc.ops.compute_entropy import compute_entropy
from exportkit.arr_coc.ops.compute_salience import compute_salience
from exportkit.arr_coc.ops.query_alignment import query_alignment
from exportkit.errors import UsageError


class Scores(NamedTuple):
    """The scores of every patch, each [B, N] in [0, 1], which depend on one sample only.

    Attributes:
        entropy: The information in its features: the normalised entropy of their softmax.
        salience: How much it stands out: edges, contrast with its neighbours, features unlike the image's mean.
        alignment: How well it fits the query: the cosine similarity with the best of the query's tokens.
    """

    entropy: Tensor
    salience: Tensor
    alignment: Tensor


class Scoring(nn.Module):
    """Computes the three scores.

    Args:
        patch_size: The side of a patch in pixels.
        temperature: The softmax's temperature, above 0. A low one separates features that differ little.
        salience_weights: The weights of edges, colour contrast and features, each at least 0 with a sum above 0. They
            are divided by their sum.
    """

    def __init__(
        self, patch_size: int, temperature: float = 1.0, salience_weights: Sequence[float] = (0.5, 0.25, 0.25)
    ) -> None:
        super().__init__()
        if not temperature > 0:
            raise UsageError(f"temperature must be above 0, got {temperature:g}")
        if len(salience_weights) != 3 or min(salience_weights) < 0 or not sum(salience_weights) > 0:
            given = list(salience_weights)
            raise UsageError(f"salience weights must be three numbers >= 0 with a sum above 0, got {given}")
        self.patch_size, self.temperature = patch_size, float(temperature)
        self.salience_weights = [float(weight) for weight in salience_weights]

    def forward(self, features: Tensor, maps: TextureMaps, query: Tensor, mask: Tensor | None = None) -> Scores:
        """Scores patches.

        Args:
            features: [B, N, D].
            maps: The pixel maps that the features come from.
            query: [B, D] or [B, T, D], in the features' space.
            mask: bool [B, T], True where a token counts.
        """
        pixels = maps.lab, maps.sobel_x, maps.sobel_y
        return Scores(
            entropy=compute_entropy(features, self.temperature),
            salience=compute_salience(features, *pixels, self.patch_size, self.salience_weights),
            alignment=query_alignment(features, query, mask),
        )

    def extra_repr(self) -> str:
        """Returns the text for the module's repr."""
        numbers = f"patch_size={self.patch_size}, temperature={self.temperature:g}"
        return f"{numbers}, salience_weights={self.salience_weights}"
