"""Modules whose programs differ in a known way."""

from __future__ import annotations

import torch


class Net(torch.nn.Module):
    def __init__(self, *, bias: float = 0.5) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.full((3,), bias))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": torch.relu(x + self.bias) * 2, "n": torch.ones_like(x, dtype=torch.int64).sum(1)}
