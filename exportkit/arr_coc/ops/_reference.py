"""Helpers of the references: the dtype the kernels compute in, bounds, norms and unit vectors."""

from __future__ import annotations

import torch
from torch import Tensor

NORM_FLOOR = 1e-12
"""Norms are clamped to at least this before a division, like in torch.nn.functional.normalize."""


def accumulated(tensor: Tensor) -> Tensor:
    """Converts a tensor to the dtype the kernels compute in: float64 stays, other dtypes become float32."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def at_least(tensor: Tensor, bound: float) -> Tensor:
    """Returns the larger numbers; NaN stays. The bound passes its gradient: from torch 2.14 on, clamp gives it none."""
    return torch.where(tensor < bound, bound, tensor)


def at_most(tensor: Tensor, bound: float) -> Tensor:
    """Returns the smaller numbers, as `at_least` does."""
    return torch.where(tensor > bound, bound, tensor)


def norm(tensor: Tensor) -> Tensor:
    """Returns L2 norms over the last dimension, which is kept with size 1. Not clamped."""
    return torch.linalg.vector_norm(tensor, dim=-1, keepdim=True)


def unit(tensor: Tensor) -> Tensor:
    """Divides a tensor by its norms over the last dimension, clamped at `NORM_FLOOR`."""
    return tensor / at_least(norm(tensor), NORM_FLOOR)
