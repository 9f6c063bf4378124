"""The models of the golden packages: sizes that vary, a keyword, a constant, a nested result.

That of version 1 calls two of our operators, whose library travels; that of version 2 has every kind of weight.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from exportkit import ExportSpec


class Best(NamedTuple):
    features: Tensor
    indices: Tensor


class Golden(torch.nn.Module):
    """Mixes features, and picks the four whose distributions are the widest."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = torch.nn.Linear(8, 8)

    def forward(self, features: Tensor, mode: str = "softmax", *, bias: Tensor) -> dict[str, Best | Tensor]:
        from exportkit.arr_coc.ops import compute_entropy, top_k_patches

        mixed = self.mix(features) + bias
        scores = compute_entropy(mixed)
        return {"best": Best(*top_k_patches(scores, mixed, 4)), "scores": scores}


class Weighted(torch.nn.Module):
    """The same without operators, and with weights that are tied, tiny, of unusual strides, unread, and constant."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = torch.nn.Linear(8, 8)
        self.tied = self.mix.weight
        self.turned = torch.nn.Parameter(torch.randn(8, 8).t())
        self.temperature = torch.nn.Parameter(torch.tensor(0.5))
        self.norm = torch.nn.BatchNorm1d(8)
        self.register_buffer("low", torch.randn(8).bfloat16())
        self.register_buffer("positions", torch.linspace(0, 1, 8), persistent=False)

    def forward(self, features: Tensor, mode: str = "softmax", *, bias: Tensor) -> dict[str, Best | Tensor]:
        mixed = self.mix(features) @ self.tied + self.positions + self.low.float() + bias
        mixed = self.norm(mixed.transpose(1, 2)).transpose(1, 2) @ self.turned
        scores = torch.special.entr(torch.softmax(mixed * self.temperature.exp(), -1)).sum(-1)
        indices = scores.topk(4).indices
        best = mixed.gather(1, indices.unsqueeze(-1).expand(-1, -1, 8))
        return {"best": Best(best, indices), "scores": scores}


def spec() -> ExportSpec:
    torch.manual_seed(0)
    return ExportSpec(
        model=Weighted(),
        example_inputs=(torch.randn(3, 12, 8), "softmax"),
        example_kwargs={"bias": torch.randn(8)},
        dynamic_shapes={"features": {0: "batch[1:16]", 1: "patches[4:256]"}},
        name="golden",
    )
