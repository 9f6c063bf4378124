"""A module with state in rows, which refuses a word: what requests of several sessions do on a GPU."""

from __future__ import annotations

import torch
from torch import nn

import exportkit


class Diary(nn.Module):
    """Words that are read fade in a memory, which is an output, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(10, 8)
        self.register_buffer("memory", torch.zeros(2, 8))

    def forward(self, word: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.memory.mul_(0.5).add_(self.words(word) * x)
        return torch.sin(self.memory), self.memory


def diary() -> exportkit.ExportSpec:
    return exportkit.ExportSpec(
        model=Diary(),
        example_inputs=(torch.tensor([3, 4]), torch.rand(2, 8)),
        dynamic_shapes={"word": {0: "batch[1:32]"}, "x": {0: "batch[1:32]"}},
        state={"memory": "batch"},
    )
