"""Helpers of the references: the dtype the kernels compute in, norms and unit vectors."""

from __future__ import annotations

import torch
from torch import Tensor

NORM_FLOOR = 1e-12
"""Norms are clamped to at least this before a division, like in torch.nn.functional.normalize."""


def accumulated(tensor: Tensor) -> Tensor:
    """Converts a tensor to the dtype the kernels compute in: float64 stays, other dtypes become float32."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def norm(tensor: Tensor) -> Tensor:
    """Returns L2 norms over the last dimension, which is kept with size 1. Not clamped."""
    return torch.linalg.vector_norm(tensor, dim=-1, keepdim=True)


def unit(tensor: Tensor) -> Tensor:
    """Divides a tensor by its norms over the last dimension, clamped at `NORM_FLOOR`."""
    return tensor / norm(tensor).clamp(min=NORM_FLOOR)
