"""A compiled model with state in rows, which fails for a label: what becomes of sessions that run together."""

from __future__ import annotations

from pathlib import Path

import torch

from exportkit.package import manifest as m
from tests.runtime import tiny

WIDTH = 8
REFUSED = 100  # the least label that is refused


class Count(torch.nn.Module):
    def forward(
        self, x: torch.Tensor, label: torch.Tensor, memory: torch.Tensor, seen: torch.Tensor
    ) -> list[torch.Tensor]:
        torch._check(label.max().item() < REFUSED)
        memory.mul_(0.5).add_(x * label[:, None])
        seen.add_(1)
        return [torch.sin(memory), seen + label]


def write(path: Path) -> Path:
    """Writes the package."""
    batch = torch.export.Dim("batch", min=1, max=16)
    args = (torch.rand(3, WIDTH), torch.arange(3), torch.zeros(3, WIDTH), torch.zeros(3, dtype=torch.int64))
    files = tiny.compiled(Count(), args, {name: {0: batch} for name in ("x", "label", "memory", "seen")})
    row, label = ("float32", (tiny.BATCH, WIDTH)), ("int64", (tiny.BATCH,))
    call = tiny.tensors_call({"x": row, "label": label}, [row, label], tolerance=tiny.NEAR, batch=(1, 16))
    state = tuple(
        m.StateTensor(name=name, aliases=(), dtype=dtype, shape=shape, initial=None, tolerance=tiny.NEAR)
        for name, (dtype, shape) in {"memory": row, "seen": label}.items()
    )
    uses = tuple(m.StateUse(index=place, written=True) for place in range(2))
    methods = (m.PackagedMethod(name="forward", call=call, state=uses),)
    return tiny.write(path, files, methods=methods, state=state, name="counting")
