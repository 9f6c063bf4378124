"""A compiled model with state in rows, which fails for a label: what becomes of sessions that run together."""

from __future__ import annotations

from pathlib import Path

import torch

from exportkit.package import manifest as m
from tests.runtime import tiny

WIDTH = 8
REFUSED = 100  # the least label that is refused
_BATCH = m.Size(dimension="batch")
_TOLERANCE = m.OutputTolerance(rtol=1e-5, atol=1e-6)


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
    call = m.Call(
        parameters=tuple(
            m.Parameter(name=name, kind="positional", value=m.TensorNode(index=place))
            for place, name in enumerate(("x", "label"))
        ),
        inputs=(
            m.TensorInput(name="x", dtype="float32", shape=(_BATCH, WIDTH), written=None),
            m.TensorInput(name="label", dtype="int64", shape=(_BATCH,), written=None),
        ),
        result=m.SequenceNode(kind="list", items=(m.TensorNode(index=0), m.TensorNode(index=1))),
        outputs=(
            m.TensorOutput(name="0", dtype="float32", shape=(_BATCH, WIDTH), tolerance=_TOLERANCE),
            m.TensorOutput(name="1", dtype="int64", shape=(_BATCH,), tolerance=_TOLERANCE),
        ),
        dimensions=(m.Dimension(name="batch", min=1, max=16),),
    )
    shapes = {"memory": ("float32", (_BATCH, WIDTH)), "seen": ("int64", (_BATCH,))}
    state = tuple(
        m.StateTensor(name=name, aliases=(), dtype=dtype, shape=shape, initial=None, tolerance=_TOLERANCE)
        for name, (dtype, shape) in shapes.items()
    )
    uses = tuple(m.StateUse(index=place, written=True) for place in range(2))
    methods = (m.PackagedMethod(name="forward", call=call, state=uses),)
    return tiny.write(path, files, methods=methods, state=state, name="counting")
