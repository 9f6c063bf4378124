"""A compiled model of rows and of another size, which fails for a label: what requests do when one of them is wrong."""

from __future__ import annotations

from pathlib import Path

import torch

from exportkit.package import manifest as m
from tests.runtime import tiny

REFUSED = 100  # the least label that is refused
_BATCH, _LENGTH = m.Size(dimension="batch"), m.Size(dimension="length")


class Labelled(torch.nn.Module):
    """It looks at the label of the first row alone."""

    def forward(self, x: torch.Tensor, label: torch.Tensor) -> list[torch.Tensor]:
        torch._check(label[0].item() < REFUSED)
        return [(x * label[:, None, None]).transpose(1, 2), label + 1]


def write(path: Path) -> Path:
    """Writes the package."""
    batch, length = torch.export.Dim("batch", min=1, max=16), torch.export.Dim("length", min=1, max=64)
    args = (torch.rand(3, 5, 8), torch.arange(3))
    files = tiny.compiled(Labelled(), args, {"x": {0: batch, 1: length}, "label": {0: batch}})
    exact = m.OutputTolerance(rtol=0.0, atol=0.0)
    call = m.Call(
        parameters=tuple(
            m.Parameter(name=name, kind="positional", value=m.TensorNode(index=place))
            for place, name in enumerate(("x", "label"))
        ),
        inputs=(
            m.TensorInput(name="x", dtype="float32", shape=(_BATCH, _LENGTH, 8), written=None),
            m.TensorInput(name="label", dtype="int64", shape=(_BATCH,), written=None),
        ),
        result=m.SequenceNode(kind="list", items=(m.TensorNode(index=0), m.TensorNode(index=1))),
        outputs=(
            m.TensorOutput(name="0", dtype="float32", shape=(_BATCH, 8, _LENGTH), tolerance=exact),
            m.TensorOutput(name="1", dtype="int64", shape=(_BATCH,), tolerance=exact),
        ),
        dimensions=(m.Dimension(name="batch", min=1, max=16), m.Dimension(name="length", min=1, max=64)),
    )
    return tiny.write(path, files, call=call, name="labelled")
