"""The process that records cases: it makes the model with the new weights, and calls it with the recorded inputs."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from exportkit.child.messages import serve
from exportkit.errors import UsageError
from exportkit.export.models.eager_model import rebuild_eager
from exportkit.export.models.placement import usable_device
from exportkit.export.models.program_model import state_of
from exportkit.export.record.cases import state_sha256
from exportkit.export.record.eager_methods import DescribedModel, EagerMethods
from exportkit.export.record.eager_run import run_eagerly
from exportkit.export.record.numerical_stability import NumericalStability
from exportkit.export.record.record import record_run
from exportkit.export.record.sequences import DrawnCall
from exportkit.fine_tune.recording import CasesRecorded, RecordCases
from exportkit.package.case_files import edge_case_of
from exportkit.package.manifest import Case, CaseCall, Manifest, decode_checked
from exportkit.spec import ExportSpec


def record(command: RecordCases) -> CasesRecorded:
    """Records the cases. An edge case is left out if with these weights right code may answer it otherwise."""
    manifest = decode_checked(command.manifest.encode())
    device = usable_device(command.device)
    found, drawn = [], []
    stability: NumericalStability | None = None
    with _model(command, manifest, device) as spec:
        eager = EagerMethods(spec)
        _begin_as_packaged(eager, command, manifest)
        model = DescribedModel(eager, manifest.methods, manifest.state, device, manifest.provenance.tf32)
        old = [
            (case, files, edge_case_of(Path(files[0]).read_bytes()))
            for case, files in zip(command.cases, command.files)
        ]
        largest = max((files[0] for _, files, edge_case in old if not edge_case), key=_size, default=None)
        for case, (inputs, output), edge_case in sorted(old, key=lambda each: bool(each[2])):
            tensors = load_file(inputs)
            calls = [_drawn(eager, manifest, tensors, number, call) for number, call in enumerate(case.calls)]
            eager_run = run_eagerly(model, calls)
            made = record_run(eager_run, edge_case=edge_case, outliers=inputs == largest)
            if not edge_case:
                drawn.append(made)
            else:
                stability = stability or NumericalStability(drawn)
                if stability.problem(eager_run, made) is not None:
                    continue
            Path(output).write_bytes(made.tensors)
            accuracy, dtype = dict(made.state_accuracy), made.reference_dtype
            found.append(Case(record=case.record, calls=made.calls, reference_dtype=dtype, state_accuracy=accuracy))
    order = [case.record for case in command.cases]
    return CasesRecorded(tuple(sorted(found, key=lambda case: order.index(case.record))))


def _size(file: str) -> int:
    return Path(file).stat().st_size


@contextmanager
def _model(command: RecordCases, manifest: Manifest, device: torch.device) -> Iterator[ExportSpec]:
    """Makes the model with the new weights."""
    eager = command.eager.source()
    with rebuild_eager(eager, manifest.source, manifest.methods, manifest.state, device) as spec:
        if state_sha256(spec.model, spec.state) != manifest.source.state_sha256:
            raise _changed(f"{eager.model} with these weights has another state than the package will have")
        yield spec


def _begin_as_packaged(eager: EagerMethods, command: RecordCases, manifest: Manifest) -> None:
    """Lets sessions begin as the package's do: other weights do not change that."""
    known = state_of(manifest, lambda record: Path(command.initial[record]).read_bytes())
    eager.buffers = tuple(
        replace(buffer, initial=known[buffer.name].to(buffer.initial.device)) for buffer in eager.buffers
    )


def _drawn(
    eager: EagerMethods, manifest: Manifest, tensors: dict[str, torch.Tensor], number: int, recorded: CaseCall
) -> DrawnCall:
    """Returns a recorded call."""
    name = recorded.method
    call = manifest.method(name).call
    if name not in eager.specs:
        raise _changed(f"the model has the methods {', '.join(eager.specs)}; the package has {name}")
    example = eager.bind(name, eager.specs[name].example_inputs, eager.specs[name].example_kwargs)
    taken = tuple(tensor.name for tensor in call.inputs)
    if example.names != taken:
        raise _changed(f"{name} of the model takes {', '.join(example.names)}; the package takes {', '.join(taken)}")
    args, kwargs = example.with_tensors(tuple(tensors[f"{number}.input.{index}"] for index in range(len(taken))))
    return DrawnCall(name, eager.bind(name, args, kwargs), recorded.sizes)


def _changed(problem: str) -> UsageError:
    return UsageError(problem, hint="Its source may have changed since the export. Export it again with these weights.")


def main(connection: socket.socket) -> None:
    """Entry point of the child."""
    serve(connection, {RecordCases: record})
