"""Selects patches, and computes their positions and token budgets."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from exportkit.arr_coc.ops.allocate_lod_tokens import allocate_lod_tokens
from exportkit.arr_coc.ops.rms_norm_quantize import rms_norm_quantize
from exportkit.arr_coc.ops.select_patches import centres, select_patches
from exportkit.arr_coc.ops.top_k_patches import top_k_patches
from exportkit.errors import UsageError

Gating = Literal["scale", "straight-through"]
GATINGS: tuple[Gating, ...] = ("scale", "straight-through")
FeatureDtype = Literal["float", "int8"]
FEATURE_DTYPES: tuple[FeatureDtype, ...] = ("float", "int8")
RMS_FLOOR = 1e-6  # added to mean squares, so that a row of zeros has a root


def differentiates(module: nn.Module) -> bool:
    """Returns whether a gradient can be asked for. The fused operators have none (docs/adr/0008-fused-forms.md)."""
    return module.training or torch.is_grad_enabled()


class Selection(NamedTuple):
    """The selected patches, most relevant first.

    Attributes:
        features: [B, K, D], gated by their scores; int8 if `feature_scales` is given.
        indices: int64 [B, K], indices of the patches in row-major order.
        budgets: int64 [B, K], in tokens.
        scores: [B, K], the relevance of each patch.
        positions: float32 [B, K, 2], the centre of each patch as (y, x), fractions of height and width.
        feature_scales: float32 [B, K], the factors for int8 features, which include the gates.
    """

    features: Tensor
    indices: Tensor
    budgets: Tensor
    scores: Tensor
    positions: Tensor
    feature_scales: Tensor | None = None


class Selector(nn.Module):
    """Selects the K most relevant patches, or all patches if there are fewer, with the arguments of `build`.

    A ranking passes no gradient. Scores multiply the selected features, and so relevance learns. The gating
    "straight-through" keeps their values, but computes gradients as if they had been multiplied. In eval mode without
    gradients, the fused operator `select_patches` does this, unless gating is "straight-through" or features are int8.

    Features in "int8" are quantised in eval mode, relative to the largest value of a patch (-127 to 127), which takes
    at most a quarter of float32's bytes. Training does not quantise, because rounding has no gradient.
    """

    def __init__(
        self,
        k: int = 200,
        *,
        gating: Gating = "scale",
        feature_dtype: FeatureDtype = "float",
        min_tokens: int = 64,
        max_tokens: int = 400,
        gamma: float = 1.0,
        mean_tokens: int | None = None,
    ) -> None:
        super().__init__()
        if k < 1:
            raise UsageError(f"k must be at least 1, got {k}")
        if gating not in GATINGS:
            raise UsageError(f"gating must be one of {', '.join(GATINGS)}, got {gating!r}")
        if feature_dtype not in FEATURE_DTYPES:
            raise UsageError(f"feature_dtype must be one of {', '.join(FEATURE_DTYPES)}, got {feature_dtype!r}")
        if not 0 <= min_tokens <= max_tokens:
            raise UsageError(
                f"token limits must be 0 <= min <= max, got min_tokens={min_tokens}, max_tokens={max_tokens}"
            )
        if not 0 < gamma < math.inf:
            raise UsageError(f"gamma must be above 0 and finite, got {gamma:g}")
        if mean_tokens is not None and not min_tokens <= mean_tokens <= max_tokens:
            raise UsageError(f"mean_tokens must lie in {min_tokens} to {max_tokens}, got {mean_tokens}")
        self.k = k
        self.gating = gating
        self.feature_dtype = feature_dtype
        self.min_tokens, self.max_tokens = min_tokens, max_tokens
        self.gamma = float(gamma)
        self.mean_tokens = mean_tokens

    def forward(self, relevance: Tensor, features: Tensor, grid: tuple[int, int]) -> Selection:
        """Selects by relevance [B, N] among features [B, N, D] of a grid of rows x columns = N patches."""
        count = relevance.shape[1]
        # torch 2.11 cannot compile sym_min of plain numbers.
        k = min(self.k, count) if isinstance(count, int) else torch.sym_min(self.k, count)
        total = None if self.mean_tokens is None else k * self.mean_tokens
        limits = self.min_tokens, self.max_tokens, self.gamma, total
        rows, columns = grid
        if self.gating == "scale" and self.feature_dtype == "float" and not differentiates(self):
            gated, indices, budgets, scores, positions = select_patches(relevance, features, k, rows, columns, *limits)
            return Selection(gated, indices, budgets, scores, positions)
        kept, indices = top_k_patches(relevance, features, k)
        scores = relevance.gather(1, indices)
        budgets = allocate_lod_tokens(scores.detach(), *limits)
        positions = centres(indices, rows, columns)
        if self.feature_dtype == "int8" and not self.training:
            steps, scales = self._quantise(kept.detach(), scores)
            return Selection(steps, indices, budgets, scores, positions, scales)
        return Selection(self._gate(kept, scores), indices, budgets, scores, positions)

    def extra_repr(self) -> str:
        """Returns the text for the module's repr."""
        tokens = f"tokens={self.min_tokens}..{self.max_tokens}, gamma={self.gamma:g}, mean_tokens={self.mean_tokens}"
        return f"k={self.k}, gating={self.gating}, feature_dtype={self.feature_dtype}, {tokens}"

    def _gate(self, kept: Tensor, scores: Tensor) -> Tensor:
        gate = scores.unsqueeze(-1)
        if self.gating == "scale":
            return kept * gate
        # The bracket is exactly 0, so values do not change. Its gradient by the score is the feature's value.
        return kept + kept.detach() * (gate - gate.detach())

    def _quantise(self, kept: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Returns int8 [B, K, D] and float32 scales [B, K]; their product approximates the gated features."""
        # The integers do not depend on a row's length, so the scale includes it, and the gate.
        steps, scales = rms_norm_quantize(kept, kept.new_ones(kept.shape[-1]), RMS_FLOOR)
        scales = scales * (kept.float().square().mean(-1) + RMS_FLOOR).sqrt()
        return steps, scales * scores.float() if self.gating == "scale" else scales
