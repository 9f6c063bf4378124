"""Recorded sequences of the small model with state: what exportkit-run and the examples replay."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save

from exportkit.package import manifest as m
from tests.runtime import stateful
from tests.runtime.stateful import WIDTH, Recorder

RECORD = "exportkit/cases/0.safetensors"
STEPS = ("push", "peek", "embed", "fill", "push")


def tensors(batch: int = 2) -> dict[str, torch.Tensor]:
    """A sequence of all methods in one session, as the eager module answers it."""
    eager, generator = Recorder(batch), torch.Generator().manual_seed(3)
    found: dict[str, torch.Tensor] = {}
    for number, name in enumerate(STEPS):
        inputs = [torch.randn(batch, 1 if name == "peek" else WIDTH, generator=generator)]
        if name == "fill":
            inputs.append(torch.randn(batch, WIDTH, generator=generator))
        found |= {f"{number}.input.{i}": tensor.clone() for i, tensor in enumerate(inputs)}
        found[f"{number}.output.0"] = getattr(eager, name)(*inputs)
        if name == "fill":
            found[f"{number}.written.1"] = inputs[1]
    return found | {f"state.{j}": tensor for j, tensor in enumerate(eager.buffers())}


def write(path: Path, recorded: dict[str, torch.Tensor], batch: int = 2) -> Path:
    """The package with this recorded sequence."""
    calls = tuple(m.CaseCall(method=name, sizes={"batch": batch}) for name in STEPS)
    case = m.Case(record=RECORD, calls=calls)
    return stateful.write(path, extra={RECORD: save(recorded)}, cases=(case,))
