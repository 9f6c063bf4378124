"""A saved ExportedProgram as MODEL: the program travels, and is compiled where its target is."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.export.passes import move_to_device_pass
from torch.utils._pytree import tree_map_only

from exportkit.errors import (
    DigestMismatchError,
    ExportError,
    ModelNotFoundError,
    NoManifestError,
    SchemaChangedError,
    UsageError,
)
from exportkit.export.cases import RecordedCase, case_sizes, draw_inputs, eager_mode, record_case, state_sha256
from exportkit.export.preflight import check_model, check_operators, describe_operators, graph_operators
from exportkit.export.program import (
    Progress,
    Traced,
    describe_output,
    describe_program,
    on_device,
    provenance,
)
from exportkit.export.shapes import DynamicSizes, example_numbers
from exportkit.export.signature import describe_call
from exportkit.libraries import registered_schemas
from exportkit.package.archive import PackageReader
from exportkit.package.atomic import temporary_folder
from exportkit.package.manifest import Manifest, Source
from exportkit.package.trust import demand, refuse_foreign
from exportkit.spec import ExportSpec

if TYPE_CHECKING:
    from exportkit.export.model import ResolvedModel


def load_program(path: Path, public_keys: Sequence[Path] = (), signature: Path | None = None) -> ResolvedModel:
    """Reads an ExportedProgram, ours or torch's. The operators it calls must be registered, ours excepted.

    torch may unpickle parts of it, and so execute what it says: it is held against the caller's keys and this machine's
    policies before.

    Args:
        path: The `.pt2`.
        public_keys: PEM files, of which any must have signed it.
        signature: The signature file, where it is not beside the program under its name.

    Raises:
        ModelNotFoundError: There is no such file, or it has no program.
        PackageError: It is ours, and breaks a rule of the format; or it is not signed as the caller or a policy asks.
        PolicyError: A policy of this machine cannot be read.
        UsageError: It calls an operator that no library given defines, or a key cannot be used.
        ExportError: torch.export cannot read it.
    """
    from exportkit.export.model import ResolvedModel

    if not path.is_file():
        raise ModelNotFoundError(f"there is no file {path}")
    try:
        asked = demand(public_keys or None, signature)
        with PackageReader(path, demand=asked) as reader, temporary_folder(None, "exportkit-program") as folder:
            manifest = reader.manifest
            if manifest.program is None:
                raise ModelNotFoundError(
                    f"{path} is compiled ({', '.join(t.name for t in manifest.targets)}) and holds no program",
                    hint="Export the model with --format program to compile it elsewhere.",
                )
            reader.verify()
            extracted = folder / "program.pt2"
            reader.extract(manifest.program.record, extracted)
            _register(path, manifest)
            program = _read(path, extracted)
    except NoManifestError:
        refuse_foreign(path, public_keys or None, signature)
        manifest, program = None, _read(path, path)
    args, kwargs = program.example_inputs
    spec = ExportSpec(
        model=program.module(),
        example_inputs=args,
        example_kwargs=kwargs,
        name=manifest.name if manifest else path.stem,
    )
    return ResolvedModel(
        spec=spec,
        name=str(path) if manifest is None else manifest.source.model,
        program=program,
        manifest=manifest,
        artifact=path,
    )


def trace_saved(
    resolved: ResolvedModel, *, device: torch.device, cases: int, seed: int, name: str | None, progress: Progress
) -> Traced:
    """A saved program as if it had just been traced, on another device if need be.

    The cases of one of ours stay as they were recorded; for a foreign one they are drawn, and its own graph answers.
    """
    assert resolved.program is not None
    progress(f"moving the program to {device}")
    program = move_to_device_pass(resolved.program, device)
    program._example_inputs = tree_map_only(torch.Tensor, lambda t: t.to(device), program.example_inputs)
    operators = graph_operators(program.graph_module)
    check_operators(operators, device)
    described = describe_operators(operators)
    if resolved.manifest is not None and resolved.artifact is not None:
        manifest = resolved.manifest
        with PackageReader(resolved.artifact) as reader:
            if reader.manifest != manifest:
                raise DigestMismatchError(
                    f"{resolved.artifact} was replaced by another package while it was exported",
                    hint="Export it again.",
                )
            recorded = tuple(RecordedCase(case.sizes, reader.read(case.record)) for case in manifest.cases)
        return Traced(
            program=program,
            call=manifest.call,
            operators=described,
            cases=recorded,
            source=manifest.source,
            provenance=manifest.provenance,
            name=name or manifest.name,
        )
    return _trace_foreign(replace(resolved, program=program), device, cases, seed, name, progress)


def _trace_foreign(
    resolved: ResolvedModel, on: torch.device, cases: int, seed: int, name: str | None, progress: Progress
) -> Traced:
    program = resolved.program
    assert program is not None
    args, kwargs = program.example_inputs
    spec = replace(resolved.spec, model=program.module(), example_inputs=args, example_kwargs=kwargs)
    bound = describe_call(spec.model, args, kwargs)
    with eager_mode():
        result = check_model(lambda: spec.model(*args, **kwargs), on)
    call = describe_program(program, bound, DynamicSizes(), describe_output(result), spec)
    recorded = []
    for number, sizes in enumerate(
        case_sizes(call, example_numbers(call.inputs, [t.shape for t in bound.tensors]), cases, seed)
    ):
        progress(f"recording case {number + 1}")
        drawn = describe_call(spec.model, *draw_inputs(spec, call, sizes, seed + number))
        recorded.append(record_case(spec.model, on_device(drawn, on), sizes))
    return Traced(
        program=program,
        call=call,
        operators=describe_operators(graph_operators(program.graph_module)),
        cases=tuple(recorded),
        source=Source(model=None, model_kwargs={}, dtype=None, seed=0, state_sha256=state_sha256(spec.model)),
        provenance=provenance(),
        name=name or spec.name or "model",
    )


def _register(path: Path, manifest: Manifest) -> None:
    """Makes sure that every operator of the program is registered, with the schema it was traced with."""
    from exportkit.export.model import load_our_operators

    wanted = {operator.name: operator.schema for operator in manifest.operators}
    if any(name.startswith("arr_coc::") for name in wanted):
        load_our_operators()
    if any(name.startswith("arr_coc_triton::") for name in wanted):
        importlib.import_module("exportkit.ops.triton")
    registered = registered_schemas()
    if missing := [name for name in wanted if name not in registered]:
        raise UsageError(
            f"{path} calls {', '.join(missing)}, which no library loaded here defines",
            hint="Name the library with --op-library.",
        )
    for name, schema in wanted.items():
        if registered[name] != schema:
            raise SchemaChangedError(f"{path} was traced with {schema!r}, but {registered[name]} is registered here")


def _read(path: Path, file: Path) -> torch.export.ExportedProgram:
    """torch.export.load, its errors named."""
    try:
        program = torch.export.load(file)
    except Exception as error:
        # torch raises whatever its reader stumbles over: zip, JSON, schema and operator errors alike.
        raise ExportError(
            f"{path} is no ExportedProgram that torch {torch.__version__} reads: {type(error).__name__}: {error}",
            hint="An operator it does not know comes from a library: name it with --op-library.",
        ) from error
    if program.example_inputs is None:
        raise ExportError(f"{path} was saved without its example inputs, which compiling it takes")
    return program
