"""The process that records cases: it makes the model with the new weights, and calls it with the recorded inputs."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file

from exportkit.child.messages import serve
from exportkit.eager_source import EagerSource
from exportkit.errors import UsageError, WeightsError
from exportkit.export.call_signature import BoundCall, describe_call
from exportkit.export.cases import record_case, state_sha256
from exportkit.export.eager_model import rebuild_eager
from exportkit.export.placement import on_device, usable_device
from exportkit.export.program_file import load_extracted
from exportkit.export.tolerances import accuracy_outputs
from exportkit.fine_tune import whole_state
from exportkit.package.manifest import Manifest, decode_checked
from exportkit.repack.recording import CasesRecorded, RecordCases, RecordedAccuracy
from exportkit.runtime.weights import read_state
from exportkit.spec import ExportSpec


def record(command: RecordCases) -> CasesRecorded:
    """Records the cases."""
    manifest = decode_checked(command.manifest.encode())
    device = usable_device(command.device)
    with _model(command, manifest, device) as spec:
        wanted = accuracy_outputs(manifest.call.outputs, spec.tolerances)
        found = []
        for inputs, output, sizes in command.cases:
            bound = on_device(_bound(spec, manifest, load_file(inputs)), device)
            tf32 = manifest.provenance.tf32
            case = record_case(spec.model, bound, sizes, manifest.call.outputs, wanted, tf32=tf32)
            Path(output).write_bytes(case.tensors)
            found.append(RecordedAccuracy(case.reference_dtype, dict(case.accuracy)))
    return CasesRecorded(tuple(found))


@contextmanager
def _model(command: RecordCases, manifest: Manifest, device: torch.device) -> Iterator[ExportSpec]:
    """Makes the model with the new weights."""
    eager = command.eager.source()
    if eager.model is not None:
        with rebuild_eager(eager, manifest.source, manifest.call, device) as spec:
            if state_sha256(spec.model) != manifest.source.state_sha256:
                raise UsageError(
                    f"{eager.model} with these weights has another state than the package will have",
                    hint="Its source may have changed since the export. Export it again with these weights.",
                )
            yield spec
        return
    assert command.program is not None
    yield _program(Path(command.program), manifest, eager)


def _program(path: Path, manifest: Manifest, eager: EagerSource) -> ExportSpec:
    """Reads the package's program and gives it the new weights."""
    assert eager.weights is not None
    spec = load_extracted(path, manifest, eager.op_libraries).spec
    try:
        spec.model.load_state_dict(whole_state(manifest, read_state(eager.weights)))
    except RuntimeError as error:
        raise WeightsError(f"the package's program has another state than these weights: {error}") from error
    return spec


def _bound(spec: ExportSpec, manifest: Manifest, tensors: dict[str, torch.Tensor]) -> BoundCall:
    """Returns the call of a recorded case."""
    example = describe_call(spec.model, spec.example_inputs, spec.example_kwargs)
    if example.names != tuple(tensor.name for tensor in manifest.call.inputs):
        raise UsageError(
            f"the model takes {', '.join(example.names)}; the package takes "
            f"{', '.join(tensor.name for tensor in manifest.call.inputs)}",
            hint="Its source may have changed since the export. Export it again with these weights.",
        )
    args, kwargs = example.with_tensors(tuple(tensors[f"input.{index}"] for index in range(len(example.names))))
    return describe_call(spec.model, args, kwargs)


def main(connection: socket.socket) -> None:
    """Entry point of the child."""
    serve(connection, {RecordCases: record})
