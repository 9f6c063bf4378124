"""The model of the golden packages: two of our operators, sizes that vary, a keyword, a constant, a nested result."""

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
        from exportkit.ops import compute_entropy, top_k_patches

        mixed = self.mix(features) + bias
        scores = compute_entropy(mixed)
        return {"best": Best(*top_k_patches(scores, mixed, 4)), "scores": scores}


def spec() -> ExportSpec:
    torch.manual_seed(0)
    return ExportSpec(
        model=Golden(),
        example_inputs=(torch.randn(3, 12, 8), "softmax"),
        example_kwargs={"bias": torch.randn(8)},
        dynamic_shapes={"features": {0: "batch[1:16]", 1: "patches[4:256]"}},
        name="golden",
    )
