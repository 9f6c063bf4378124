"""What the references share: the dtype the kernels compute in, and unit vectors."""

from __future__ import annotations

import torch
from torch import Tensor

NORM_FLOOR = 1e-12
"""Norms are clamped to at least this before anything is divided by them, as torch.nn.functional.normalize does."""


def accumulated(tensor: Tensor) -> Tensor:
    """`tensor` in the dtype the kernels compute in: float64 stays, everything else becomes float32."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def norm(tensor: Tensor) -> Tensor:
    """L2 norms over the last dimension, which stays with size 1. Not clamped."""
    return torch.linalg.vector_norm(tensor, dim=-1, keepdim=True)


def unit(tensor: Tensor) -> Tensor:
    """`tensor` divided by its norms over the last dimension, these clamped at `NORM_FLOOR`."""
    return tensor / norm(tensor).clamp(min=NORM_FLOOR)
