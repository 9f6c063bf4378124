"""The model `weighted`, its fine-tunes, and what they answer."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.export.weights_models import Weighted

State = dict[str, torch.Tensor]
X = torch.linspace(-1, 1, 48).reshape(3, 16)


def state(seed: int) -> State:
    """That of another fine-tune."""
    return {name: tensor.detach().clone() for name, tensor in Weighted(seed).state_dict().items()}


def eager(seed: int, x: torch.Tensor = X) -> torch.Tensor:
    with torch.no_grad():
        return Weighted(seed).eval()(x)


def save(path: Path, tensors: State) -> Path:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return path
