"""A model that sees pairs of elements as complex numbers, as Llama's rotation of positions does."""

from __future__ import annotations

import torch

from exportkit import ExportSpec


class Rotated(torch.nn.Module):
    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        turns = torch.view_as_complex(torch.stack([angles.cos(), angles.sin()], -1))
        return torch.view_as_real(pairs * turns).flatten(-2)


def rotated() -> ExportSpec:
    sizes = {"x": {0: "batch[1:8]", 1: "length[2:32]"}, "angles": {0: "length"}}
    return ExportSpec(Rotated(), (torch.randn(2, 5, 8), torch.randn(5, 4)), dynamic_shapes=sizes)
