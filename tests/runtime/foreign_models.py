"""A module that calls the operators of foreign_operators.cpp."""

from __future__ import annotations

import torch
from torch import Tensor

from exportkit import ExportSpec

torch.library.define("foreign_python::twice", "(Tensor x) -> Tensor")
for _name in ("foreign_python::twice", "foreign_old::twice"):
    torch.library.register_fake(_name, torch.empty_like)
torch.library.register_fake("foreign::converted", lambda x, *_, **__: torch.empty_like(x, dtype=torch.float64))


class Foreign(torch.nn.Module):
    """Arguments that are written and have no name, defaults of every kind, a schema from Python."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        doubled, first, second = x.clone(), x.clone(), x + 1
        torch.ops.foreign.double_(doubled)
        torch.ops.foreign.double_all_([first, second])
        return {
            "doubled": doubled,
            "all": first + second,
            "converted": torch.ops.foreign.converted(x),
            "python": torch.ops.foreign_python.twice(x),
            "old": torch.ops.foreign_old.twice(x),
        }


def foreign() -> ExportSpec:
    return ExportSpec(model=Foreign(), example_inputs=(torch.randn(4, 3),), dynamic_shapes={"x": {0: "rows[1:64]"}})
