"""Modules whose programs differ in a known way."""

from __future__ import annotations

import torch


class Net(torch.nn.Module):
    def __init__(self, *, bias: float = 0.5, factor: float = 2.0) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.full((3,), bias))
        self.factor = factor

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": torch.relu(x + self.bias) * self.factor, "n": torch.ones_like(x, dtype=torch.int64).sum(1)}


class Renamed(Net):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        another_name = x + self.bias

        count = torch.relu(another_name) * self.factor
        return {"y": count, "n": torch.ones_like(x, dtype=torch.int64).sum(1)}


class Longer(Net):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": torch.relu(x + self.bias).exp() * self.factor, "n": torch.ones_like(x, dtype=torch.int64).sum(1)}


class Branching(Net):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = torch.cond(x.sum() > 0, lambda t: t * self.factor, lambda t: t + 1, (x + self.bias,))
        return {"y": y, "n": torch.ones_like(x, dtype=torch.int64).sum(1)}
