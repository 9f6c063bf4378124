"""Modules that order or rank: ties, NaN, positions of extremes, values without repetition."""

import torch
from torch import Tensor, nn


class TiesOfTopK(nn.Module):
    """The greatest of numbers that come more than once."""

    inputs = ("x=float32[4,6]",)
    dynamic = ("x:0=rows[1:8]",)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = (x * 2).round()
        return y.topk(3)[0], y.gather(1, y.topk(3)[1])


class StableSort(nn.Module):
    """Equal elements that keep their order."""

    inputs = ("x=int64[4,6]",)
    dynamic = ("x:0=rows[1:8]",)

    def forward(self, x: Tensor) -> list[Tensor]:
        y = x % 3
        return [*torch.sort(y, dim=1, stable=True), *torch.sort(y, dim=1, stable=True, descending=True)]


class TiesOfArgmax(nn.Module):
    """The position of an extreme that comes more than once: torch takes the first."""

    inputs = ("x=int64[4,6]",)
    dynamic = ("x:0=rows[1:8]",)

    def forward(self, x: Tensor) -> list[Tensor]:
        y = x % 3
        return [y.argmax(1), y.argmin(0), y.argmax(), y.float().argmax(1)]


class RunningMaximum(nn.Module):
    """A running maximum, which torch.onnx does not know."""

    exit_code = 5
    says = "torch.onnx does not translate aten.cummax.default"
    inputs = ("x=float32[4,3]",)
    dynamic = ("x:0=rows[1:8]",)

    def forward(self, x: Tensor) -> Tensor:
        return x.cummax(0)[0]


class Median(nn.Module):
    """The median, which torch.onnx does not know."""

    exit_code = 5
    says = "torch.onnx does not translate aten.median.dim"
    inputs = ("x=float32[4,3]",)
    dynamic = ("x:0=rows[1:8]",)

    def forward(self, x: Tensor) -> Tensor:
        return x.median(1)[0]


class Bucket(nn.Module):
    """Positions in a sorted list."""

    exit_code = 5
    says = "torch.onnx does not translate aten.searchsorted.Tensor"
    inputs = ("x=float32[4,3]",)
    dynamic = ("x:0=rows[1:8]",)

    def forward(self, x: Tensor) -> Tensor:
        return torch.searchsorted(torch.tensor([-1.0, 0.0, 1.0]), x, right=True)


class Unique(nn.Module):
    """Values without repetition, whose number depends on values."""

    inputs = ("x=int64[4,3]",)
    dynamic = ("x:0=rows[1:8]",)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.unique(x % 4), (x % 3).nonzero()
