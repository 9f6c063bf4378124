"""ARR-COC: selects the patches of an image that matter for a query and gives each a token budget.

ARR-COC is Adaptive Relevance Realization, Contexts Optical Compression: texture -> features -> three scores -> one
relevance -> the K most relevant patches. A result does not depend on the other samples of a batch.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from exportkit.arr_coc.model.encoder import GivenFeatures, VisionTransformer
from exportkit.arr_coc.model.filters import FilterBank
from exportkit.arr_coc.model.fusion import Fusion, Scoring
from exportkit.arr_coc.model.linear import SampleLinear
from exportkit.arr_coc.model.selection import Selector, differentiates
from exportkit.arr_coc.model.texture import TextureMaps, patch_grid, texture_maps
from exportkit.arr_coc.ops.relevance_scores import relevance_scores
from exportkit.arr_coc.ops.texture_statistics import texture_statistics
from exportkit.errors import InputError, UsageError


class ARRCOC(nn.Module):
    """The pipeline.

    In eval mode without gradients, it uses the fused operators `texture_statistics`, `relevance_scores` and
    `select_patches`, which read pixels and features once. Otherwise it uses separate operators, which have gradients.

    Args:
        encoder: Computes features from an image; its patch size is the model's.
        scoring: Computes three scores from features, texture and query.
        fusion: Combines the scores to one relevance.
        selector: Selects patches by relevance.
        query_dim: The queries' width, if it differs from the features'. A learned linear map projects the queries then.
    """

    def __init__(
        self,
        encoder: FilterBank | VisionTransformer | GivenFeatures,
        scoring: Scoring,
        fusion: Fusion,
        selector: Selector,
        *,
        query_dim: int | None = None,
    ) -> None:
        super().__init__()
        if query_dim is not None and query_dim < 1:
            raise UsageError(f"query_dim must be at least 1, got {query_dim}")
        self.encoder = encoder
        self.scoring = scoring
        self.balancing = fusion  # saved weights have this name
        self.selector = selector
        self.query_dim = encoder.dim if query_dim is None else query_dim
        self.query_projection = None if query_dim is None else SampleLinear(query_dim, encoder.dim)

    def forward(self, image: Tensor, query: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
        """Finds the patches of each image that matter for its query.

        Args:
            image: [B, 3, H, W], sRGB in [0, 1], in the model's dtype; H and W are multiples of the patch size.
            query: [B, Dq], or [B, T, Dq] for T tokens. A patch is compared with the token that fits it best.
            mask: bool [B, T], True for tokens that count. None: all tokens count.

        Returns:
            With N patches and K = min(k, N), most relevant first:
            features [B, K, D], gated by their scores; indices int64 [B, K], row-major; budgets int64 [B, K], in tokens;
            scores [B, K]; positions float32 [B, K, 2], centres (y, x) as fractions of the image; feature_scales
            float32 [B, K], only with int8 features; relevance [B, N] of all patches.

        Raises:
            InputError: A shape or dtype does not fit. The message says what is allowed.
        """
        self._check_grid(patch_grid(image, self.encoder.patch_size))
        self._check_query(image, query, mask)
        maps = texture_maps(image) if self.encoder.needs_maps or differentiates(self) else None
        return self._choose(image, maps, self.encoder(image, maps), query, mask)

    def encode(self, image: Tensor) -> Tensor:
        """Returns features [B, N, D] of all patches, as `forward` computes them."""
        self._check_grid(patch_grid(image, self.encoder.patch_size))
        return self.encoder(image, texture_maps(image) if self.encoder.needs_maps else None)

    def choose(self, image: Tensor, features: Tensor, query: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
        """Does the part of `forward` after the encoder. Features are [B, N, D], row-major."""
        grid = patch_grid(image, self.encoder.patch_size)
        self._check_query(image, query, mask)
        if features.shape != (image.shape[0], grid[0] * grid[1], self.encoder.dim) or features.dtype != image.dtype:
            raise InputError(
                f"features must be [B, N, D] = {[image.shape[0], grid[0] * grid[1], self.encoder.dim]} of the image's "
                f"patches in its dtype, got {features.dtype} of shape {list(features.shape)}"
            )
        return self._choose(image, texture_maps(image) if differentiates(self) else None, features, query, mask)

    def _choose(
        self, image: Tensor, maps: TextureMaps | None, features: Tensor, query: Tensor, mask: Tensor | None
    ) -> dict[str, Tensor]:
        query = self._project(query)
        weights = self.balancing.balancer(features, query, mask)
        if maps is not None and differentiates(self):
            relevance = self.balancing(self.scoring(features, maps, query, mask), weights)
        else:
            relevance = relevance_scores(
                features,
                query,
                *texture_statistics(image, self.encoder.patch_size),
                weights,
                mask,
                self.scoring.salience_weights,
                self.scoring.temperature,
                self.balancing.invert_entropy,
            )
        selection = self.selector(relevance, features, patch_grid(image, self.encoder.patch_size))
        chosen = {name: tensor for name, tensor in selection._asdict().items() if tensor is not None}
        return {**chosen, "relevance": relevance}

    def _project(self, query: Tensor) -> Tensor:
        if self.query_projection is None:
            return query
        if query.dim() == 3:
            return self.query_projection(query)
        return self.query_projection(query.unsqueeze(1)).squeeze(1)

    def _check_grid(self, grid: tuple[int, int]) -> None:
        least = self.encoder.min_rows
        if grid[0] < least or grid[1] < least:
            size = least * self.encoder.patch_size
            raise InputError(
                f"image must be at least {size} x {size} pixels, {least} patches a side; "
                f"got {grid[0]} x {grid[1]} patches"
            )

    def _check_query(self, image: Tensor, query: Tensor, mask: Tensor | None) -> None:
        if query.dim() not in (2, 3):
            raise InputError(f"query must be [B, Dq] or [B, T, Dq], got shape {list(query.shape)}")
        if query.shape[-1] != self.query_dim:
            raise InputError(f"query must have width {self.query_dim}, got shape {list(query.shape)}")
        if query.shape[0] != image.shape[0]:
            raise InputError(f"query is for {query.shape[0]} samples, image has {image.shape[0]}")
        if query.dtype != image.dtype:
            raise InputError(f"query is {query.dtype}, image is {image.dtype}; both must have the model's dtype")
        if mask is None:
            return
        if query.dim() != 3:
            raise InputError(f"a mask needs query tokens: query must be [B, T, Dq], got shape {list(query.shape)}")
        if mask.dtype != torch.bool:
            raise InputError(f"mask must be bool, True for tokens that count, got {mask.dtype}")
        if mask.shape != query.shape[:2]:
            raise InputError(f"mask must be [B, T] = {list(query.shape[:2])}, got shape {list(mask.shape)}")


class FromFeatures(nn.Module):
    """The pipeline with features of the caller's encoder as an input.

    Args:
        model: A pipeline. Its encoder, such as `GivenFeatures`, has the width of the features and the patch size.
    """

    def __init__(self, model: ARRCOC) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: Tensor, features: Tensor, query: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
        """Computes the same as `ARRCOC.forward`, from features [B, H / P, W / P, D] of the image's patches."""
        if features.dim() != 4:
            raise InputError(f"features must be [B, H / P, W / P, D], got shape {list(features.shape)}")
        return self.model.choose(image, features.flatten(1, 2), query, mask)
