"""torch.cdist takes any numbers of rows, though torch chooses its formula by them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from exportkit import ExportSpec
from exportkit.export.export_options import TraceOptions
from exportkit.export.models.resolved import EagerModel
from exportkit.export.tracing.trace import trace


class Nearest(torch.nn.Module):
    """The nearest of some entries, and the distances to other points."""

    def __init__(self, entries: int) -> None:
        super().__init__()
        self.entries = torch.nn.Parameter(torch.randn(entries, 4))

    def forward(self, x: Tensor, others: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return torch.cdist(x, self.entries).argmin(-1), torch.cdist(x, others), torch.cdist(x, others, p=1)


@pytest.mark.parametrize("entries", [8, 32])
@pytest.mark.parametrize("rows", [3, 40])
def test_the_rows_of_distances_vary(entries: int, rows: int) -> None:
    """`trace` holds the program against eager at the ends, too."""
    spec = ExportSpec(
        Nearest(entries),
        (torch.randn(2, rows, 4), torch.randn(2, 7, 4)),
        dynamic_shapes={"x": {0: "batch[1:4]", 1: "rows[1:60]"}, "others": {0: "batch", 1: "points[1:50]"}},
    )
    (method,) = trace(EagerModel(spec), TraceOptions(), torch.device("cpu"), lambda _: None).methods
    ranges = {d.name: (d.min, d.max) for d in method.call.dimensions}
    assert ranges == {"batch": (1, 4), "rows": (1, 60), "points": (1, 50)}
    for at in (1, 25, 26, 60):
        x, others = torch.randn(1, at, 4), torch.randn(1, 50, 4)
        found = method.program.module()(x, others)
        torch.testing.assert_close(found, spec.model(x, others), atol=1e-4, rtol=1e-4)
