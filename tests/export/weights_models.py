"""Models whose weights are what a compiler likes to compute with ahead, or to lay out its own way."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from exportkit import ExportSpec


class Weighted(nn.Module):
    """Small tensors that Inductor would write into the code, tied ones, gaps, unusual strides, dtypes, unread ones."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw) * 0.3

        self.mix = nn.Parameter(drawn(16, 16))
        self.tied = self.mix
        self.few = nn.Parameter(drawn(8))
        self.temperature = nn.Parameter(drawn())
        self.one = nn.Parameter(drawn(1))
        self.corner = nn.Parameter(drawn(1, 1))
        self.often_zero = nn.Parameter(drawn(16) * (seed > 0))
        self.gaps = nn.Parameter(drawn(16, 2)[:, 0])
        self.turned = nn.Parameter(drawn(16, 8).t())
        self.register_buffer("flag", torch.tensor(seed % 2 == 0))
        self.register_buffer("nothing", torch.zeros(0, 3))
        self.register_buffer("low", drawn(16).bfloat16())
        self.register_buffer("counts", torch.randint(0, 5, (16,), generator=draw))
        self.register_buffer("positions", torch.linspace(0, 1, 16), persistent=False)
        self.norm = nn.BatchNorm1d(16)
        self.norm.running_mean.copy_(drawn(16))
        self.conv = nn.Conv2d(4, 8, 1).to(memory_format=torch.channels_last)
        self.unused = nn.Linear(3, 3)
        with torch.no_grad():
            for parameter in (*self.conv.parameters(), *self.unused.parameters(), *self.norm.parameters()):
                parameter.copy_(drawn(*parameter.shape))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.temperature.exp() + self.one * 2 + self.corner.sigmoid() + self.often_zero * 3 + self.positions
        y = torch.where(self.flag, y, -y) + self.low.float() + self.counts / 10 + self.gaps
        y = self.norm(torch.tanh(y @ self.mix @ self.tied)) + self.nothing.sum() + torch.tensor([0.5, 0.25]).sum()
        z = self.conv(y.reshape(-1, 4, 2, 2)).mean((2, 3)) + self.few
        return torch.tanh(z + y @ self.turned.t())


def weighted(seed: int = 0) -> ExportSpec:
    return ExportSpec(
        model=Weighted(seed).eval(),
        example_inputs=(torch.randn(3, 16),),
        dynamic_shapes={"x": {0: "batch[1:64]"}},
        name="weighted",
    )


class Table(nn.Module):
    """Looks up a few rows of a table that is much larger than all else that a process needs."""

    ROWS, COLUMNS = 2**19, 64  # 128 MiB

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.arange(self.ROWS * self.COLUMNS, dtype=torch.float32).reshape(self.ROWS, -1))

    def forward(self, index: Tensor) -> Tensor:
        return torch.nn.functional.embedding(index, self.rows).sum(-1)


def table() -> ExportSpec:
    return ExportSpec(model=Table().eval(), example_inputs=(torch.tensor([0, 5, Table.ROWS - 1]),), name="table")
