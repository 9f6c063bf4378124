"""Scores each patch in three ways, and weighs them, equally for all samples or by each sample's query and image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from exportkit.arr_coc.model.linear import SampleLinear
from exportkit.arr_coc.model.texture import TextureMaps
from exportkit.arr_coc.ops.compute_entropy import compute_entropy
from exportkit.arr_coc.ops.compute_salience import compute_salience
from exportkit.arr_coc.ops.opponent_balance import opponent_balance
from exportkit.arr_coc.ops.query_alignment import query_alignment
from exportkit.errors import UsageError


class Scores(NamedTuple):
    """The scores of every patch, each [B, N] in [0, 1], which depend on one sample only.

    Entropy is the information in its features: the normalised entropy of their softmax. Salience is how much it stands
    out: edges, contrast with its neighbours, features unlike the image's mean. Alignment is how well it fits the query:
    the cosine similarity with the best of the query's tokens.
    """

    entropy: Tensor
    salience: Tensor
    alignment: Tensor


class Scoring(nn.Module):
    """Computes the three scores. A low temperature of the entropy's softmax separates features that differ little.

    The weights of edges, colour contrast and features in the salience, each at least 0 with a sum above 0, are divided
    by their sum.
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
        """Scores patches by their features [B, N, D], the pixel maps that these come from, and a query in their space.

        The query is [B, D], or [B, T, D] with a bool mask [B, T], True where a token counts.
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


DEFAULT_WEIGHTS = (0.3, 0.4, 0.3)  # of entropy, salience, alignment


class FixedBalancer(nn.Module):
    """The same weights of entropy, salience and alignment for every sample, divided by their sum, which is above 0."""

    weights: Tensor

    def __init__(self, weights: Sequence[float] = DEFAULT_WEIGHTS) -> None:
        super().__init__()
        self.register_buffer("weights", torch.tensor(checked_weights(weights)), persistent=False)

    def forward(self, features: Tensor, query: Tensor, mask: Tensor | None = None) -> Tensor:
        """Returns weights [3], which do not depend on the arguments."""
        return self.weights.to(features.dtype)


class LearnedBalancer(nn.Module):
    """Computes weights for each sample with a small network, from its query and the mean of its features.

    Untrained, it gives about the given weights, all above 0.
    """

    def __init__(self, dim: int, hidden: int = 64, weights: Sequence[float] = DEFAULT_WEIGHTS) -> None:
        super().__init__()
        start = torch.tensor(checked_weights(weights))
        if not (start > 0).all():
            raise UsageError(f"a learned balancer needs initial weights above 0, got {list(weights)}")
        self.hidden = SampleLinear(2 * dim, hidden)
        self.output = SampleLinear(hidden, 3)
        # Not zero, because then no gradient would reach the hidden layer, the features or the query in the first step.
        nn.init.normal_(self.output.weight, std=0.02)
        with torch.no_grad():
            self.output.bias.copy_(start.log())

    def forward(self, features: Tensor, query: Tensor, mask: Tensor | None = None) -> Tensor:
        """Features [B, N, D], query [B, D] or [B, T, D] with bool mask [B, T] -> weights [B, 3], rows of sum 1."""
        pooled = torch.cat([_unit(features.mean(1)), _unit(pool_query(query, mask))], dim=-1)
        hidden = functional.gelu(self.hidden(pooled.unsqueeze(1)))
        return torch.softmax(self.output(hidden).squeeze(1), dim=-1)


class Fusion(nn.Module):
    """Combines three scores to one relevance by weights [3] or [B, 3].

    Inverted entropy is for features where a peak means more information than an even distribution.
    """

    def __init__(self, balancer: FixedBalancer | LearnedBalancer, *, invert_entropy: bool = False) -> None:
        super().__init__()
        self.balancer = balancer
        self.invert_entropy = invert_entropy

    def forward(self, scores: Scores, weights: Tensor) -> Tensor:
        """Returns the relevance [B, N] in [0, 1]."""
        return opponent_balance(scores.entropy, scores.salience, scores.alignment, weights, self.invert_entropy)


def checked_weights(weights: Sequence[float]) -> list[float]:
    """Returns the weights as floats. UsageError: they are not three numbers >= 0 with a sum above 0."""
    if len(weights) != 3 or not all(weight >= 0 for weight in weights) or not sum(weights) > 0:
        raise UsageError(f"balance weights must be three numbers >= 0 with a sum above 0, got {list(weights)}")
    return [float(weight) for weight in weights]


def pool_query(query: Tensor, mask: Tensor | None) -> Tensor:
    """Returns the mean of the query's unmasked tokens, [B, D]; 0 if all are masked. Returns [B, D] unchanged."""
    if query.dim() == 2:
        return query
    if mask is None:
        return query.mean(1)
    # `where` and not a product with the mask, because a masked token may be NaN.
    kept = torch.where(mask.unsqueeze(-1), query, query.new_zeros(()))
    return kept.sum(1) / mask.sum(1, keepdim=True).clamp_min(1).to(query.dtype)


def _unit(x: Tensor) -> Tensor:
    """Normalises rows to length 1, so that the network does not depend on the encoder's scale."""
    return functional.normalize(x.float() if x.dtype in (torch.float16, torch.bfloat16) else x, dim=-1).to(x.dtype)
