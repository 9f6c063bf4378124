"""A compiled model whose rows are independent or not, as an input says; its inputs have dtypes of every kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from exportkit.package import manifest as m
from tests.runtime import tiny

DTYPES = {
    "x": torch.float32,
    "coupling": torch.float32,
    "label": torch.int64,
    "flag": torch.bool,
    "half": torch.bfloat16,
}
SHAPES: dict[str, tuple[int, ...]] = {"x": (3,), "coupling": (1,), "label": (), "flag": (2,), "half": (2, 2)}
OUTPUTS = {"sum": "x", "next": "label", "other": "flag", "twice": "half"}  # which have the dtypes and sizes of inputs


class Rows(torch.nn.Module):
    """Where `coupling` is not 0, a row's answer depends on all rows."""

    def forward(
        self, x: torch.Tensor, coupling: torch.Tensor, label: torch.Tensor, flag: torch.Tensor, half: torch.Tensor
    ) -> list[torch.Tensor]:
        return [x + coupling * x.softmax(0), label + 1, ~flag, half * 2]


FEW = 9


class Few(Rows):
    """Fails with more rows than FEW, as a model does that has no memory for them."""

    def forward(
        self, x: torch.Tensor, coupling: torch.Tensor, label: torch.Tensor, flag: torch.Tensor, half: torch.Tensor
    ) -> list[torch.Tensor]:
        torch._check((label >= 0).sum().item() <= FEW)
        return super().forward(x, coupling, label, flag, half)


def example(batch: int, coupling: float = 0.0) -> dict[str, torch.Tensor]:
    return {
        "x": torch.randn(batch, 3),
        "coupling": torch.full((batch, 1), coupling),
        "label": torch.randint(0, 100, (batch,)),
        "flag": torch.rand(batch, 2) > 0.5,
        "half": torch.randn(batch, 2, 2).bfloat16(),
    }


def answer(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return dict(zip(OUTPUTS, Rows()(**inputs)))


def call(least: int = 1) -> m.Call:
    inputs = {key: (str(dtype).removeprefix("torch."), (tiny.BATCH, *SHAPES[key])) for key, dtype in DTYPES.items()}
    outputs = {key: inputs[like] for key, like in OUTPUTS.items()}
    return tiny.tensors_call(inputs, outputs, tolerance=tiny.NEAR, batch=(least, 32))


def compiled_files(model: type[Rows] = Rows) -> dict[str, Path]:
    batch = torch.export.Dim("batch", min=1, max=32)
    return tiny.compiled(model(), tuple(example(3).values()), {key: {0: batch} for key in DTYPES})


def write(
    path: Path,
    *examples: dict[str, torch.Tensor],
    wrong: float = 0.0,
    least: int = 1,
    model: type[Rows] = Rows,
    **changes: Any,
) -> Path:
    """A package with these recorded calls; `wrong` is added to their recorded answers."""
    records: dict[str, bytes | Path] = {}
    cases = []
    for index, inputs in enumerate(examples):
        name = f"exportkit/cases/{index}.safetensors"
        outputs = answer(inputs)
        outputs["sum"] = outputs["sum"] + wrong
        records[name] = save(
            {f"0.input.{i}": tensor for i, tensor in enumerate(inputs.values())}
            | {f"0.output.{i}": tensor for i, tensor in enumerate(outputs.values())}
        )
        cases.append(tiny.one_call(name, batch=len(inputs["x"])))
    temporary = path.with_suffix(".new")
    tiny.write(
        temporary, compiled_files(model), extra=records, cases=tuple(cases), call=call(least), name="rows", **changes
    )
    temporary.replace(path)
    return path
