"""Library functions that do the same as exportkit's operators, with the operators' signatures.

They are timed after their results were compared with the reference's. Small differences are allowed: a library may
break ties in another way. Some references compute half types in float32, which takes a pass for each cast. For these
operators, the alternative here computes without the casts.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class LibraryCall:
    """An alternative to an operator. `needs` is the package to install; None for torch."""

    what: str
    function: Callable[..., Any]
    needs: str | None = None

    @property
    def missing(self) -> str | None:
        """Why it cannot be timed here; None if it can."""
        if self.needs is None or importlib.util.find_spec(self.needs) is not None:
            return None
        return f"{self.needs} is not installed"


def _kornia(rgb: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    from kornia.color import rgb_to_grayscale, rgb_to_lab
    from kornia.filters import spatial_gradient

    gradients = spatial_gradient(rgb_to_grayscale(rgb), mode="sobel", order=1, normalized=True)
    return rgb_to_lab(rgb), gradients[:, :, 0], gradients[:, :, 1]


def _categorical(features: Tensor) -> Tensor:
    entropy = torch.distributions.Categorical(logits=features, validate_args=False).entropy()
    return entropy / math.log(features.shape[-1])


def _cosine_similarity(features: Tensor, query: Tensor) -> Tensor:
    return (1 + functional.cosine_similarity(features, query.unsqueeze(1), dim=-1)) / 2


def _topk(scores: Tensor, features: Tensor, k: int) -> tuple[Tensor, Tensor]:
    indices = torch.topk(scores, k, dim=1).indices
    return features.gather(1, indices.unsqueeze(-1).expand(-1, -1, features.shape[-1])), indices


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.layer_norm(x, weight.shape, weight, bias)


def _rms_norm_quantize(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    normed = functional.rms_norm(x, weight.shape, weight, 1e-6)
    scale = normed.abs().amax(-1).float() / 127
    return (normed / scale.unsqueeze(-1)).round_().clamp_(-127, 127).to(torch.int8), scale


def _bias_relu(x: Tensor, bias: Tensor) -> Tensor:
    return torch.relu_(x + bias)


def _scale_bias_relu(x: Tensor, bias: Tensor, scale: float) -> Tensor:
    return torch.relu_(torch.add(bias, x, alpha=scale))


def _addcmul(a: Tensor, b: Tensor, c: float) -> Tensor:
    return torch.addcmul(a.new_full((), c), a, b)


def _add_out(a: Tensor, b: Tensor, out: Tensor) -> None:
    torch.add(a, b, out=out)


KORNIA = LibraryCall("kornia's rgb_to_lab and spatial_gradient", _kornia, needs="kornia")
CATEGORICAL = LibraryCall("torch.distributions.Categorical.entropy", _categorical)
COSINE_SIMILARITY = LibraryCall("torch.nn.functional.cosine_similarity", _cosine_similarity)
TOPK = LibraryCall("torch.topk and gather", _topk)
LAYER_NORM = LibraryCall("torch.nn.functional.layer_norm", _layer_norm)
LINEAR = LibraryCall("torch.nn.functional.linear", functional.linear)
RMS_NORM = LibraryCall("torch.nn.functional.rms_norm, amax, round, clamp", _rms_norm_quantize)
SOFTMAX = LibraryCall("torch.softmax", lambda x: torch.softmax(x, -1))
SUM = LibraryCall("torch.sum", lambda x, dim: torch.sum(x, dim))
RELU = LibraryCall("torch.relu", torch.relu)
BIAS_RELU = LibraryCall("x + bias and torch.relu_", _bias_relu)
SCALE_BIAS_RELU = LibraryCall("torch.add(alpha=) and torch.relu_", _scale_bias_relu)
ADDCMUL = LibraryCall("torch.addcmul", _addcmul)
ADD_OUT = LibraryCall("torch.add(out=)", _add_out)
