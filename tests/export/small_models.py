"""A model of small convolutions and products."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from exportkit import ExportSpec


class Small(nn.Module):
    """A convolution with few channels, a normalization, one with many, a depthwise one, and a linear layer."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(
            nn.Conv1d(2, 8, 3, padding=1),
            nn.BatchNorm1d(8),
            nn.ReLU(),
            nn.Conv1d(8, 9, 3, 2, dilation=2),
            nn.ReLU(),
            nn.Conv1d(9, 9, 3, padding=1, groups=9),
            nn.Flatten(),
            nn.Linear(54, 4),
        )
        self.layers[1].running_var.uniform_(0.5, 2)  # of eight: Inductor writes such short constants into the code
        self.eval()

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        head = self.layers[-1]
        assert isinstance(head, nn.Linear)
        return self.layers(x) + head.weight[:, 0]  # the code needs this weight as it is, too


def small() -> ExportSpec:
    return ExportSpec(
        model=Small(), example_inputs=(torch.randn(2, 2, 16),), dynamic_shapes={"x": {0: "batch[1:64]"}}, name="small"
    )
