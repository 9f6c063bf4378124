"""The model of the golden package: sizes that vary, a keyword, a constant, a nested result, an operator, weights."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from exportkit import ExportSpec

torch.library.register_fake("golden::scaled_sum", lambda xs, bias=None, *, by=1.0: torch.empty_like(xs[0]))


class Best(NamedTuple):
    features: Tensor
    indices: Tensor


class Golden(torch.nn.Module):
    """Mixes features and picks the four that are spread the widest.

    Its weights are tied, tiny, of unusual strides, unread, and constant.
    """

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
        mixed = torch.ops.golden.scaled_sum([mixed, features], mixed.flip(-1), by=0.5)
        mixed = self.norm(mixed.transpose(1, 2)).transpose(1, 2) @ self.turned
        scores = torch.special.entr(torch.softmax(mixed * self.temperature.exp(), -1)).sum(-1)
        indices = scores.topk(4).indices
        best = mixed.gather(1, indices.unsqueeze(-1).expand(-1, -1, 8))
        return {"best": Best(best, indices), "scores": scores}


def spec() -> ExportSpec:
    torch.manual_seed(0)
    return ExportSpec(
        model=Golden(),
        example_inputs=(torch.randn(3, 12, 8), "softmax"),
        example_kwargs={"bias": torch.randn(8)},
        dynamic_shapes={"features": {0: "batch[1:16]", 1: "patches[4:256]"}},
        name="golden",
    )
