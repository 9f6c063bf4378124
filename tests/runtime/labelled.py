"""Compiled models of rows which fail for a label, without state and with it: what requests do when one is wrong."""

from __future__ import annotations

from pathlib import Path

import torch

from exportkit.package import manifest as m
from tests.runtime import tiny

WIDTH = 8
REFUSED = 100  # the least label that is refused
LENGTH = m.Size(dimension="length")
LABEL = ("int64", (tiny.BATCH,))


class Labelled(torch.nn.Module):
    """It looks at the label of the first row alone."""

    def forward(self, x: torch.Tensor, label: torch.Tensor) -> list[torch.Tensor]:
        torch._check(label[0].item() < REFUSED)
        return [(x * label[:, None, None]).transpose(1, 2), label + 1]


def write(path: Path) -> Path:
    """Writes a package of rows and of another size."""
    batch, length = torch.export.Dim("batch", min=1, max=16), torch.export.Dim("length", min=1, max=64)
    args = (torch.rand(3, 5, WIDTH), torch.arange(3))
    files = tiny.compiled(Labelled(), args, {"x": {0: batch, 1: length}, "label": {0: batch}})
    inputs = {"x": ("float32", (tiny.BATCH, LENGTH, WIDTH)), "label": LABEL}
    outputs = [("float32", (tiny.BATCH, WIDTH, LENGTH)), LABEL]
    return tiny.write(
        path, files, call=tiny.tensors_call(inputs, outputs, batch=(1, 16), length=(1, 64)), name="labelled"
    )


class Count(torch.nn.Module):
    def forward(
        self, x: torch.Tensor, label: torch.Tensor, memory: torch.Tensor, seen: torch.Tensor
    ) -> list[torch.Tensor]:
        torch._check(label.max().item() < REFUSED)
        memory.mul_(0.5).add_(x * label[:, None])
        seen.add_(1)
        return [torch.sin(memory), seen + label]


def write_counting(path: Path) -> Path:
    """Writes a package with state in rows."""
    batch = torch.export.Dim("batch", min=1, max=16)
    args = (torch.rand(3, WIDTH), torch.arange(3), torch.zeros(3, WIDTH), torch.zeros(3, dtype=torch.int64))
    files = tiny.compiled(Count(), args, {name: {0: batch} for name in ("x", "label", "memory", "seen")})
    row = ("float32", (tiny.BATCH, WIDTH))
    call = tiny.tensors_call({"x": row, "label": LABEL}, [row, LABEL], tolerance=tiny.NEAR, batch=(1, 16))
    state = tuple(
        m.StateTensor(name=name, aliases=(), dtype=dtype, shape=shape, initial=None, tolerance=tiny.NEAR)
        for name, (dtype, shape) in {"memory": row, "seen": LABEL}.items()
    )
    uses = tuple(m.StateUse(index=place, written=True) for place in range(2))
    methods = (m.PackagedMethod(name="forward", call=call, state=uses),)
    return tiny.write(path, files, methods=methods, state=state, name="counting")
