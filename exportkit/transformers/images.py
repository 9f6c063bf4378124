"""Images in the prompts of a language model: the features in the places of tokens, and what draws them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

_TYPES = ("token_type_ids", "mm_token_type_ids")  # what processors say of each token: 1 for those of images


def image_token(model: Any) -> int | None:
    """Returns the token that a model reads features of images in place of, or None."""
    names = ("image_token_id", "image_token_index") if hasattr(model, "get_image_features") else ()
    return next((token for name in names if (token := getattr(model.config, name, None)) is not None), None)


class ImageFeatures(nn.Module):
    """What a model makes of images, [features, width]: one for each token of an image."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Tensor:
        """Takes what `get_image_features` of the model takes."""
        found = self.model.get_image_features(**inputs)
        found = getattr(found, "pooler_output", found)  # which transformers 5 wraps
        parts = found if isinstance(found, (list, tuple)) else [found]
        return torch.cat([part.flatten(0, -2) for part in parts])


def prompt_with_images(model: Any, inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Returns a prompt of a word, images and a word, their features, and the model's logits after it.

    The inputs are what a processor makes of images.
    """
    features = ImageFeatures(model)(**inputs)
    token: Any = image_token(model)
    tokens = torch.full((1, len(features) + 2), token, device=features.device)
    tokens[0, [0, -1]] = 1 if token != 1 else 2
    types = {name: tokens.eq(token).long() for name in _TYPES if name in inspect.signature(model.forward).parameters}
    return tokens, features, model(input_ids=tokens, use_cache=False, **inputs, **types).logits[0, -1]


def draw_images(
    tokens: Tensor, lengths: Tensor, model: Any, count: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns a drawn prompt whose first tokens are of images, its lengths, and so many features."""
    token: Any = image_token(model)
    words = model.get_input_embeddings().weight
    real = torch.arange(tokens.shape[1]) < lengths[:, None]
    image = real & (real.reshape(-1).cumsum(0).reshape(real.shape) <= count)
    features = torch.randn(count, words.shape[1], generator=generator).to(words.dtype)
    return tokens.masked_fill(image, token), lengths, features
