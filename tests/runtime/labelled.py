"""A compiled model of rows and of another size, which fails for a label: what requests do when one of them is wrong."""

from __future__ import annotations

from pathlib import Path

import torch

from exportkit.package import manifest as m
from tests.runtime import tiny

REFUSED = 100  # the least label that is refused
_LENGTH = m.Size(dimension="length")


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
    label = ("int64", (tiny.BATCH,))
    call = tiny.tensors_call(
        {"x": ("float32", (tiny.BATCH, _LENGTH, 8)), "label": label},
        [("float32", (tiny.BATCH, 8, _LENGTH)), label],
        batch=(1, 16),
        length=(1, 64),
    )
    return tiny.write(path, files, call=call, name="labelled")
