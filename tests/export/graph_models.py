"""Models for CUDA graphs: one whose calls can be graphs, and those whose calls cannot."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from exportkit import ExportSpec


class Mixed(nn.Module):
    """Outputs of several dtypes, one that is an input and one that is a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        y = torch.tanh(x @ self.weight)
        best, place = y.max(-1)
        return y, best, place, place + ids, x, y.half(), self.weight


class Selects(nn.Module):
    """The size of the result depends on values, so that a call waits for the GPU."""

    def forward(self, x: Tensor) -> Tensor:
        return x[x.sum(-1) > 0] * 2


class Random(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)


class Products(nn.Module):
    """Few results of long sums, for which cuBLAS divides the sums and writes their parts to memory of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8192, 64, generator=torch.Generator().manual_seed(0)).bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        y = x.bfloat16()
        return torch.cat([y @ self.weight, torch.addmm(self.weight[0], -y, self.weight)], -1)


def _spec(model: nn.Module, name: str, *inputs: Tensor) -> ExportSpec:
    names = ("x", "ids")[: len(inputs)]
    return ExportSpec(
        model=model.eval(),
        example_inputs=inputs,
        dynamic_shapes={each: {0: "batch[1:256]"} for each in names},
        name=name,
    )


def mixed() -> ExportSpec:
    return _spec(Mixed(), "mixed", torch.randn(3, 8), torch.arange(3))


def selects() -> ExportSpec:
    return _spec(Selects(), "selects", torch.randn(3, 8))


def products() -> ExportSpec:
    return _spec(Products(), "products", torch.randn(3, 8192))


def random() -> ExportSpec:
    return _spec(Random(), "random", torch.randn(3, 8))
