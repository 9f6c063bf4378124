"""Reads a saved ExportedProgram: the program travels, and is compiled where its target is."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path

import torch

from exportkit.errors import ExportError, ModelNotFoundError, NoManifestError, SchemaChangedError, UsageError
from exportkit.export.resolved import SavedProgram
from exportkit.libraries import built_in_libraries, registered_schemas
from exportkit.package.archive import PackageReader
from exportkit.package.atomic import temporary_folder
from exportkit.package.manifest import Manifest
from exportkit.package.trust import demand, refuse_foreign
from exportkit.spec import ExportSpec


def load_program(path: Path, public_keys: Sequence[Path] = (), signature: Path | None = None) -> SavedProgram:
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
    return SavedProgram(spec=spec, program=program, path=path, manifest=manifest)


def load_our_operators() -> None:
    """Registers `arr_coc::*`, with fakes and gradients, where it was built and is not registered yet."""
    if "cpu" in built_in_libraries():
        importlib.import_module("exportkit.ops")


def _register(path: Path, manifest: Manifest) -> None:
    """Makes sure that every operator of the program is registered, with the schema it was traced with."""
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
