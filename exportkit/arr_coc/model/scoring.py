"""Three ways of knowing which patch matters, with one score each.

Propositional: how informative a patch is. Perspectival: how much it stands out. Participatory: how well it fits the
query. Each score is in [0, 1] and depends on one sample only.
"""

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
    """The three scores of every patch, each [B, N] in [0, 1]."""

    entropy: Tensor
    salience: Tensor
    alignment: Tensor


class Propositional(nn.Module):
    """Scores the information in a patch's features: the normalised entropy of their softmax.

    Args:
        temperature: The softmax's temperature, above 0. A low one separates features that differ little.
    """

    def __init__(self, temperature: float = 1.0) -> None:
        super().__init__()
        if not temperature > 0:
            raise UsageError(f"temperature must be above 0, got {temperature:g}")
        self.temperature = float(temperature)

    def forward(self, features: Tensor) -> Tensor:
        """[B, N, D] -> [B, N]."""
        return compute_entropy(features, self.temperature)

    def extra_repr(self) -> str:
        """Returns the text for the module's repr."""
        return f"temperature={self.temperature:g}"


class Perspectival(nn.Module):
    """Scores how much a patch stands out: edges, contrast with its neighbours, features unlike the image's mean.

    Args:
        patch_size: The side of a patch in pixels.
        weights: The weights of edges, colour contrast and features, each at least 0 with a sum above 0. They are
            divided by their sum.
    """

    def __init__(self, patch_size: int, weights: Sequence[float] = (0.5, 0.25, 0.25)) -> None:
        super().__init__()
        if len(weights) != 3 or min(weights) < 0 or not sum(weights) > 0:
            raise UsageError(f"salience weights must be three numbers >= 0 with a sum above 0, got {list(weights)}")
        self.patch_size = patch_size
        self.weights = [float(weight) for weight in weights]

    def forward(self, features: Tensor, maps: TextureMaps) -> Tensor:
        """Features [B, N, D] and the pixel maps they come from -> [B, N]."""
        return compute_salience(features, maps.lab, maps.sobel_x, maps.sobel_y, self.patch_size, self.weights)

    def extra_repr(self) -> str:
        """Returns the text for the module's repr."""
        return f"patch_size={self.patch_size}, weights={self.weights}"


class Participatory(nn.Module):
    """Scores how well a patch fits the query: the cosine similarity with the best of the query's tokens."""

    def forward(self, features: Tensor, query: Tensor, mask: Tensor | None = None) -> Tensor:
        """Features [B, N, D], query [B, D] or [B, T, D] with bool mask [B, T], True where a token counts -> [B, N]."""
        return query_alignment(features, query, mask)


class Knowing(nn.Module):
    """The three scorers side by side."""

    def __init__(self, propositional: Propositional, perspectival: Perspectival, participatory: Participatory) -> None:
        super().__init__()
        self.propositional = propositional
        self.perspectival = perspectival
        self.participatory = participatory

    def forward(self, features: Tensor, maps: TextureMaps, query: Tensor, mask: Tensor | None = None) -> Scores:
        """Features [B, N, D], pixel maps, query in the features' space -> three scores [B, N]."""
        return Scores(
            entropy=self.propositional(features),
            salience=self.perspectival(features, maps),
            alignment=self.participatory(features, query, mask),
        )
