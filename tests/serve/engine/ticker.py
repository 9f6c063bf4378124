"""A compiled model with state in rows, which are independent or not, as an input says."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save

from exportkit.package import manifest as m
from tests.runtime import tiny

WIDTH = 64


class Tick(torch.nn.Module):
    """Where `coupling` is not 0, the state depends on all rows."""

    def forward(self, x: torch.Tensor, coupling: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        memory.mul_(0.5).add_(torch.tanh(x) + coupling * x.mean(0))
        return torch.sin(memory) + x


def inputs(seed: int, rows: int = 1, coupling: float = 0.0) -> dict[str, torch.Tensor]:
    x = torch.rand(rows, WIDTH, generator=torch.Generator().manual_seed(seed))
    return {"x": x, "coupling": torch.full((rows, 1), coupling)}


def write(path: Path, coupling: float = 0.0, **changes: object) -> Path:
    """Writes the package, with a recorded sequence of three steps of two rows."""
    batch = torch.export.Dim("batch", min=1, max=16)
    args = (*inputs(0, 3).values(), torch.zeros(3, WIDTH))
    files = tiny.compiled(Tick(), args, {name: {0: batch} for name in ("x", "coupling", "memory")})
    memory, record = torch.zeros(2, WIDTH), "exportkit/cases/0.safetensors"
    tensors = {}
    for number in range(3):
        given = inputs(number, 2, coupling)
        tensors |= {f"{number}.input.{place}": tensor for place, tensor in enumerate(given.values())}
        tensors[f"{number}.output.0"] = Tick()(*given.values(), memory)
    row = (tiny.BATCH, WIDTH)
    described = {"x": ("float32", row), "coupling": ("float32", (tiny.BATCH, 1))}
    call = tiny.tensors_call(described, ("float32", row), tolerance=tiny.NEAR, batch=(1, 16))
    state = m.StateTensor(name="memory", aliases=(), dtype="float32", shape=row, initial=None, tolerance=tiny.NEAR)
    calls = tuple(m.CaseCall(method="forward", sizes={"batch": 2}) for _ in range(3))
    return tiny.write(
        path,
        files,
        extra={record: save(tensors)},
        methods=(m.PackagedMethod(name="forward", call=call, state=(m.StateUse(index=0, written=True),)),),
        state=(state,),
        cases=(m.Case(record=record, calls=calls),),
        name="ticker",
        **changes,
    )
