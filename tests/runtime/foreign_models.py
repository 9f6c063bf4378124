"""A module that calls the operators of foreign_operators.cpp."""

from __future__ import annotations

import torch
from torch import Tensor

from exportkit import ExportSpec

torch.library.define("foreign_python::twice", "(Tensor x) -> Tensor")
for _name in ("foreign_python::twice", "foreign_old::twice"):
    torch.library.register_fake(_name, torch.empty_like)
torch.library.register_fake("foreign::converted", lambda x, *_, **__: torch.empty_like(x, dtype=torch.float64))
torch.library.register_fake("foreign::halved", lambda x, out=None: torch.empty_like(x))
torch.library.register_fake("foreign::increased", lambda x: [])
torch.library.register_fake(
    "foreign::parts",
    lambda x, y: [torch.empty_like(x), x.new_empty(0, dtype=torch.int64), x.new_empty(()), x.new_empty(2, 2)],
)


class Foreign(torch.nn.Module):
    """Arguments that are written and have no name, defaults of every kind, lists with gaps, a schema from Python."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        doubled, first, second, more = x.clone(), x.clone(), x + 1, x * 3
        torch.ops.foreign.double_(doubled)
        torch.ops.foreign.increased(doubled)
        torch.ops.foreign.double_all_([first, second])
        product, _, total, _ = torch.ops.foreign.parts(more, x)
        return {
            "parts": product + total + more,
            "halved": torch.ops.foreign.halved(x),
            "doubled": doubled,
            "all": first + second,
            "converted": torch.ops.foreign.converted(x),
            "python": torch.ops.foreign_python.twice(x),
            "old": torch.ops.foreign_old.twice(x),
        }


def foreign() -> ExportSpec:
    return ExportSpec(model=Foreign(), example_inputs=(torch.randn(4, 3),), dynamic_shapes={"x": {0: "rows[1:64]"}})


class Undefined(torch.nn.Module):
    """Returns what the operator does not make."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.foreign.parts(x.clone(), x)[1]


def undefined() -> ExportSpec:
    return ExportSpec(model=Undefined(), example_inputs=(torch.randn(4, 3),))
