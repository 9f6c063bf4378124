"""Models that Inductor gets wrong because torch's own hook or this file plants a bug."""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor import lowering

from exportkit import ExportSpec


class Relu(torch.nn.Module):
    """One node."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x)


def relu() -> ExportSpec:
    """A model that is wrong with the option cpp.inject_relu_bug_TESTING_ONLY of Inductor."""
    return ExportSpec(Relu(), (torch.linspace(-1, 1, 64).reshape(2, 32),))


def refused() -> ExportSpec:
    """A model that does not compile: the lowering of its node raises."""

    def raises(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("no such thing as relu")

    lowering.lowerings[torch.ops.aten.relu.default] = raises
    return relu()
