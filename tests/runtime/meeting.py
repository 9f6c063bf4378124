"""A compiled model with an operator that waits for other calls of it, and with outputs of every kind of tolerance."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save

from exportkit.libraries import load_library
from exportkit.package import manifest as m
from tests.fixtures import stable_library
from tests.runtime import tiny

SCHEMA = "meeting::meet(Tensor x) -> Tensor"
WAITING_SCHEMA = "meeting::waiting() -> int"
KEPT = 3  # of each row, by rank


class Meeting(torch.nn.Module):
    """Waits until as many calls are under way as x's first element says; then y = 2x, and x's greatest elements."""

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> list[torch.Tensor]:
        return [torch.ops.meeting.meet(x), *answer(x, rows)[1:]]


def answer(x: torch.Tensor, rows: torch.Tensor) -> list[torch.Tensor]:
    """What the model returns for a first element of 0 or 1."""
    indices = x.topk(KEPT).indices
    kept = rows.gather(1, indices.unsqueeze(-1).expand(-1, -1, rows.shape[-1])) * 1
    return [x * 2, x * 1, indices, kept, rows * 1, rows.argmax(1)]


def library() -> Path:
    """The operator library."""
    return stable_library.build(Path(__file__).with_suffix(".cpp"))


def compiled_files() -> dict[str, Path]:
    """The model's compiled files; its operator is loaded in this process from then on."""
    load_library(library(), defines=["meeting"])
    torch.library.register_fake("meeting::meet", torch.empty_like, allow_override=True)
    batch = torch.export.Dim("batch", min=1, max=64)
    return tiny.compiled(Meeting(), (torch.rand(4, 8), torch.rand(4, 8, 2)), {"x": {0: batch}, "rows": {0: batch}})


def write(
    path: Path,
    cases: Sequence[tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]] = (),
    references: Sequence[Sequence[torch.Tensor]] = (),
    accuracy: m.Accuracy | None = None,
) -> Path:
    """A package of the model with these recorded inputs and outputs, and, if given, references of all outputs."""
    packed = tiny.library(library().read_bytes(), SCHEMA, WAITING_SCHEMA, name=library().name)
    records: dict[str, bytes | Path] = {packed.record: library()}
    recorded = []
    for i, (inputs, outputs) in enumerate(cases):
        name = f"exportkit/cases/{i}.safetensors"
        tensors = {f"0.input.{k}": tensor for k, tensor in enumerate(inputs)}
        tensors |= {f"0.output.{k}": tensor for k, tensor in enumerate(outputs)}
        tensors |= {f"0.reference.{k}": tensor for k, tensor in enumerate(references[i] if references else ())}
        records[name] = save(tensors)
        errors = {o.name: accuracy if o.dtype == "float32" else None for o in call().outputs} if references else {}
        one = m.CaseCall(method="forward", sizes={"batch": len(inputs[0])}, accuracy=errors)
        recorded.append(m.Case(record=name, calls=(one,), reference_dtype="float64" if references else None))
    return tiny.write(
        path,
        compiled_files(),
        extra=records,
        name="meeting",
        cases=tuple(recorded),
        call=call(),
        operators=packed.defines[:1],
        libraries=(packed,),
    )


def call() -> m.Call:
    """The manifest's description of the model's call."""
    x, kept = ("float32", (tiny.BATCH, 8)), (tiny.BATCH, KEPT)
    plain = tiny.tensors_call(
        {"x": x, "rows": ("float32", (tiny.BATCH, 8, 2))},
        {
            "doubled": x,
            "scores": x,
            "indices": ("int64", kept),
            "kept": ("float32", (*kept, 2)),
            "logits": ("float32", (tiny.BATCH, 8, 2)),
            "labels": ("int64", (tiny.BATCH, 2)),
        },
        tolerance=m.OutputTolerance(rtol=1e-3, atol=1e-4),
        batch=(1, 64),
    )
    changes: dict[str, dict[str, object]] = {
        "indices": {"ranking_of": "scores"},
        "kept": {"rows_of": "indices"},
        "labels": {"ranking_of": "logits", "dim": 1},
    }
    outputs = (
        msgspec.structs.replace(o, tolerance=msgspec.structs.replace(o.tolerance, **changes.get(o.name, {})))
        for o in plain.outputs
    )
    return msgspec.structs.replace(plain, outputs=tuple(outputs))
