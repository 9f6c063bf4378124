"""Slices whose ends are values of tensors are compiled, and answer what eager does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from exportkit.export.artifact import export_aoti
from exportkit.export.export_options import TraceOptions
from exportkit.runtime.loader import load
from exportkit.spec import ExportSpec


class Slices(torch.nn.Module):
    """One end, the other, both, a step, and a dimension that does not come first."""

    def forward(self, x: Tensor, n: Tensor) -> tuple[Tensor, ...]:
        end = n.item()
        chosen = (x[:end], x[end:], x[1:end], x[end:3], x[:end:2], x[-end:], x[:, :end], x[None, :, end:])
        return tuple(part.sum(0).sum() for part in chosen)


@pytest.mark.process
def test_a_slice_may_end_or_begin_at_a_value(tmp_path: Path) -> None:
    def draw(sizes: dict[str, int], generator: torch.Generator) -> tuple[tuple[Tensor, Tensor], dict]:
        return (torch.rand(sizes["rows"], 3, generator=generator), torch.randint(-6, 7, (), generator=generator)), {}

    shapes = {"x": {0: "rows[3:9]"}}
    example = (torch.rand(4, 3), torch.tensor(2))
    spec = ExportSpec(Slices(), example, dynamic_shapes=shapes, draw_inputs=draw)
    export_aoti(spec, tmp_path / "slices.pt2", TraceOptions(cases=1, trouble=False))
    with load(tmp_path / "slices.pt2", device="cpu") as model:
        for rows in (3, 4, 9):
            x = torch.rand(rows, 3)
            for n in range(-10, 11):
                torch.testing.assert_close(model(x, torch.tensor(n)), Slices()(x, torch.tensor(n)))
