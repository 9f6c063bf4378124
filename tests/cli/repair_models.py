"""Models that Inductor gets wrong by itself or by torch's own hook."""

from __future__ import annotations

import torch

from exportkit import ExportSpec


class Relu(torch.nn.Module):
    """One node."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x)


def relu() -> ExportSpec:
    """A model that is wrong with the option cpp.inject_relu_bug_TESTING_ONLY of Inductor."""
    return ExportSpec(Relu(), (torch.linspace(-1, 1, 64).reshape(2, 32),))


class Rounded(torch.nn.Module):
    """A product of float16 that becomes an integer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.half() * 3).to(torch.int32)


def rounded() -> ExportSpec:
    """A model whose integers rounding decides."""
    return ExportSpec(Rounded(), (torch.arange(3000.0).reshape(3, 1000) - 1500,))
