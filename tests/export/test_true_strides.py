"""Results of torch's kernels are read where they are, also where torch describes them with other strides."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from exportkit import ExportSpec
from exportkit.export.artifact import export_aoti
from exportkit.export.export_options import TraceOptions
from exportkit.export.models.resolved import EagerModel
from exportkit.runtime.loader import load


class Columns(torch.nn.Module):
    """The columns that differ lie one after the other in memory, and torch says that the rows do."""

    def forward(self, x):
        values, inverse, counts = torch.unique(x, dim=1, return_inverse=True, return_counts=True)
        return values[0] * 2, inverse, counts, values + 1, torch.unique(x, dim=0)


@pytest.mark.process
def test_columns_that_differ_are_read_where_the_kernel_writes_them(tmp_path: Path) -> None:
    out, x = tmp_path / "columns.pt2", torch.tensor([[3.0, 1, 3, 2, 1], [0, 5, 0, 5, 5]])
    spec = ExportSpec(Columns(), (x,), dynamic_shapes={"x": {0: "rows[2:9]", 1: "columns[2:40]"}})
    export_aoti(EagerModel(spec), out, TraceOptions(cases=1, edge_cases=False))
    with load(out, device="cpu") as model:
        for given in (x, torch.randint(0, 2, (3, 30)).float()):
            for one, other in zip(model(given), Columns()(given), strict=True):
                assert torch.equal(one, other)
