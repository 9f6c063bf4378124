"""Modules that order or rank: ties, NaN, positions of extremes, values without repetition."""

import torch
from torch import Tensor, nn


class RunningMaximum(nn.Module):
    """A running maximum, which torch.onnx does not know."""

    exit_code = 5
    says = "torch.onnx does not translate aten.cummax.default"
    inputs = ("x=float32[4,3]",)
    dynamic = ("x:0=rows[1:8]",)

    def forward(self, x: Tensor) -> Tensor:
        return x.cummax(0)[0]


class Unique(nn.Module):
    """Values without repetition, whose number depends on values."""

    inputs = ("x=int64[4,3]",)
    dynamic = ("x:0=rows[1:8]",)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.unique(x % 4), (x % 3).nonzero()
