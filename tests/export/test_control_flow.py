"""Loops that torch cannot trace are refused in a sentence with the line; the gallery has more."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

from exportkit.errors import ExportError
from exportkit.export.artifact import export_program
from exportkit.spec import ExportSpec


class BodyOfAnotherDtype(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, v.double()), (torch.tensor(0), x.clone()))[1]


class VmapInABody(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return scan(lambda c, v: (torch.vmap(torch.mul)(c, v), c.sin()), x.new_ones(3), x)[1]


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (BodyOfAnotherDtype, "dtype: torch.float64 vs torch.float32"),
        (VmapInABody, "torch.vmap is called within scan at test_control_flow.py"),
    ],
)
def test_a_loop_is_refused_with_its_line(model: type[nn.Module], says: str, tmp_path) -> None:
    with pytest.raises(ExportError, match=r"at test_control_flow\.py") as refused:
        export_program(ExportSpec(model(), (torch.rand(4, 3),)), tmp_path / "out.pt2")
    assert says in str(refused.value)
