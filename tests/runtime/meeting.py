"""A compiled model with an operator that waits for other calls of it, and with outputs of every kind of tolerance."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from exportkit.libraries import host_platform, load_library
from exportkit.package import manifest as m
from tests.runtime import tiny

SCHEMA = "meeting::meet(Tensor x) -> Tensor"
WAITING_SCHEMA = "meeting::waiting() -> int"
RECORD = f"exportkit/ops/{host_platform()}/libmeeting.so"
KEPT = 3  # of each row, by rank


class Meeting(torch.nn.Module):
    """Waits until as many calls are under way as x's first element says; then y = 2x, and x's greatest elements."""

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> list[torch.Tensor]:
        indices = x.topk(KEPT).indices
        gathered = rows.gather(1, indices.unsqueeze(-1).expand(-1, -1, rows.shape[-1]))
        return [torch.ops.meeting.meet(x), x * 1, indices, gathered * 1]


def answer(x: torch.Tensor, rows: torch.Tensor) -> list[torch.Tensor]:
    """What the model returns for a first element of 0 or 1."""
    indices = x.topk(KEPT).indices
    return [x * 2, x * 1, indices, rows.gather(1, indices.unsqueeze(-1).expand(-1, -1, rows.shape[-1]))]


@functools.lru_cache(maxsize=1)
def library() -> Path:
    """The operator library, built once for its source and this torch."""
    source = Path(__file__).with_suffix(".cpp").read_text()
    torch_folder = Path(torch.__file__).parent
    command = ["g++", "-std=c++17", "-O1", "-fPIC", "-shared", "-s", "-DTORCH_TARGET_VERSION=0x020b000000000000"]
    command += [f"-I{torch_folder / 'include'}", "-x", "c++", "-", f"-L{torch_folder / 'lib'}"]
    command += ["-Wl,--no-as-needed", "-ltorch_cpu", "-Wl,-soname,libmeeting.so"]
    key = hashlib.sha256(repr((source, torch.__version__, command)).encode()).hexdigest()[:16]
    path = tiny.CACHE / f"meeting-{key}" / "libmeeting.so"
    if not path.exists():
        if shutil.which("g++") is None:
            pytest.skip("no g++ to build the library with")
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{os.getpid()}.so")
        subprocess.run([*command, "-o", temporary], input=source, text=True, check=True)
        temporary.replace(path)
    return path


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
    records: dict[str, bytes | Path] = {RECORD: library()}
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
    operator = m.Operator(name="meeting::meet", schema=SCHEMA)
    packed = m.Library(
        record=RECORD,
        sha256=hashlib.sha256(library().read_bytes()).hexdigest(),
        platform=host_platform(),
        device="cpu",
        kernels=("cpu",),
        defines=(operator, m.Operator(name="meeting::waiting", schema=WAITING_SCHEMA)),
        needs_torch="2.11",
        torch_bound=None,
        needs=(),
    )
    return tiny.write(
        path,
        compiled_files(),
        extra=records,
        name="meeting",
        cases=tuple(recorded),
        call=call(),
        operators=(operator,),
        libraries=(packed,),
    )


def call() -> m.Call:
    """The manifest's description of the model's call."""
    batch = m.Size(dimension="batch")

    def output(name: str, dtype: str, shape: tuple[int | m.Size, ...], **tolerance: object) -> m.TensorOutput:
        limits = {"rtol": 1e-3, "atol": 1e-4} if dtype == "float32" else {"rtol": 0.0, "atol": 0.0}
        return m.TensorOutput(name=name, dtype=dtype, shape=shape, tolerance=m.OutputTolerance(**limits, **tolerance))

    names = ("doubled", "scores", "indices", "kept")
    return m.Call(
        parameters=(
            m.Parameter(name="x", kind="positional", value=m.TensorNode(index=0)),
            m.Parameter(name="rows", kind="positional", value=m.TensorNode(index=1)),
        ),
        inputs=(
            m.TensorInput(name="x", dtype="float32", shape=(batch, 8), written=None),
            m.TensorInput(name="rows", dtype="float32", shape=(batch, 8, 2), written=None),
        ),
        result=m.MappingNode(keys=names, items=tuple(m.TensorNode(index=i) for i in range(4))),
        outputs=(
            output("doubled", "float32", (batch, 8)),
            output("scores", "float32", (batch, 8)),
            output("indices", "int64", (batch, KEPT), ranking_of="scores"),
            output("kept", "float32", (batch, KEPT, 2), rows_of="indices"),
        ),
        dimensions=(m.Dimension(name="batch", min=1, max=64),),
    )
