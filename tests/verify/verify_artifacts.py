"""Small artifacts with a program in them: they go the way of compiled ones, and take no compiler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save

from exportkit.package import manifest as m
from exportkit.package.archive import write_package
from tests.package import samples
from tests.runtime import tiny

DIGEST = "0" * 64
MISBEHAVING_SCHEMA = "misbehaving::act(Tensor x) -> Tensor"


class Affine(torch.nn.Module):
    """y = 2x, in memory column by column; n = the number of columns of each row, as int64."""

    def forward(self, x):
        return {"y": (x.t() * 2).t(), "n": torch.ones_like(x, dtype=torch.int64).sum(1)}


class Misbehaving(torch.nn.Module):
    """Does what its input says: 0 returns it doubled, 1 dies of a signal, 2 stalls, 3 raises."""

    def forward(self, x):
        return {"y": torch.ops.misbehaving.act(x), "n": torch.ones_like(x, dtype=torch.int64).sum(1)}


def write_artifact(
    path: Path,
    model: torch.nn.Module,
    cases: Sequence[tuple[torch.Tensor, Mapping[str, torch.Tensor]]],
    *,
    source: str | None = None,
    state_sha256: str = DIGEST,
    operators: Sequence[m.Operator] = (),
) -> Path:
    """An artifact with `model` as its program: x is float32 [rows, 3], rows 1 to 8."""
    rows = torch.export.Dim("rows", min=1, max=8)
    program = torch.export.export(model, (torch.zeros(4, 3),), dynamic_shapes={"x": {0: rows}})
    saved = path.with_name("program.pt2")
    torch.export.save(program, saved)
    records: dict[str, bytes | Path] = {"exportkit/program.pt2": saved}
    for i, (x, outputs) in enumerate(cases):
        tensors = {"0.input.0": x} | {f"0.output.{k}": tensor for k, tensor in enumerate(outputs.values())}
        records[f"exportkit/cases/{i}.safetensors"] = save(tensors)
    manifest = samples.bare_manifest(
        "affine",
        methods=tiny.forward(affine_call()),
        source=m.Source(model=source, model_kwargs={}, dtype=None, seed=0, state_sha256=state_sha256),
        program=m.Program(
            records={"forward": "exportkit/program.pt2"}, device="cpu", built_with_torch=str(torch.__version__)
        ),
        operators=tuple(operators),
        cases=tuple(tiny.one_call(f"exportkit/cases/{i}.safetensors", rows=len(x)) for i, (x, _) in enumerate(cases)),
    )
    write_package(path, manifest, records)
    saved.unlink()
    return path


def affine_call() -> m.Call:
    """x -> {"y": float32, "n": int64}."""
    rows = m.Size(dimension="rows")
    x = ("float32", (rows, 3))
    return tiny.tensors_call({"x": x}, {"y": x, "n": ("int64", (rows,))}, tolerance=tiny.NEAR, rows=(1, 8))


def right(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """What the models answer."""
    return {"y": x * 2, "n": torch.full((len(x),), 3)}
