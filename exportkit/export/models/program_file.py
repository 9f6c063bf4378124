"""Reads saved ExportedPrograms, so that they can be compiled on another machine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from exportkit.errors import (
    ExportError,
    ModelNotFoundError,
    NoManifestError,
    SchemaChangedError,
    UntrustedProgramError,
    UsageError,
)
from exportkit.export.models.program_model import program_spec, state_of
from exportkit.export.models.resolved import SavedProgram
from exportkit.installed import register_operators
from exportkit.libraries import LoadedLibrary, load_library, schemas_of
from exportkit.package.archive import PackageReader
from exportkit.package.atomic import temporary_folder
from exportkit.package.manifest import Manifest
from exportkit.package.trust import Trust
from exportkit.program_reader import read_program
from exportkit.spec import FORWARD


def load_program(path: Path, trust: Trust = Trust(), *, trusted: bool = False) -> SavedProgram:
    """Reads an ExportedProgram that exportkit or torch wrote, which runs what its author wrote.

    The operators that it calls must be registered, or an installed package must declare them. Keys, policies and
    `trusted` are checked before torch gets the file.

    Args:
        path: The `.pt2`.
        trust: Who must have signed the file.
        trusted: Whether a file of torch.export.save may be read. exportkit's own files are packages, for which `trust`
            and policies decide.

    Raises:
        ModelNotFoundError: The file does not exist, or has no program.
        UntrustedProgramError: It is a file of torch.export.save, and not `trusted`.
        PackageError: A file of exportkit breaks a rule of the format, or a signature that the caller or a policy
            requires is missing.
        PolicyError: A policy of this machine cannot be read.
        UsageError: The program calls an operator that no given library defines, or a key cannot be used.
        ExportError: torch.export cannot read the file.
    """
    if not path.is_file():
        raise ModelNotFoundError(f"there is no file {path}")
    manifest, programs, initial = None, {}, {}
    try:
        with (
            PackageReader(path, demand=trust.demand()) as reader,
            temporary_folder(None, "exportkit-program") as folder,
        ):
            manifest = reader.manifest
            if manifest.program is None:
                raise ModelNotFoundError(
                    f"{path} has compiled code ({', '.join(t.name for t in manifest.targets)}) but no program",
                    hint="To compile the model elsewhere, export it with --format program.",
                )
            reader.verify()
            _register(path, manifest)
            for number, (method, record) in enumerate(manifest.program.records.items()):
                extracted = folder / f"{number}.pt2"
                reader.extract(record, extracted)
                programs[method] = _read(path, extracted)
            initial = state_of(manifest, reader.read)
    except NoManifestError:
        trust.refuse_foreign(path)
        if not trusted:
            raise UntrustedProgramError(
                f"{path} was not written by exportkit, and torch.export.load runs what the author of such a file wrote",
                hint="If you trust its author, give --trust.",
            ) from None
    if manifest is None:
        programs = {FORWARD: _read(path, path)}
    spec = program_spec(programs, manifest, initial, manifest.name if manifest else path.stem)
    return SavedProgram(spec=spec, programs=programs, path=path, manifest=manifest)


def load_extracted(files: Mapping[str, Path], manifest: Manifest, libraries: Iterable[Path | str]) -> SavedProgram:
    """Reads the programs of an artifact, which were extracted to files, in a process that has nothing loaded.

    Modules among the libraries are left to MODEL, which is not made here.
    """
    loaded: list[LoadedLibrary] = []
    for library in libraries:
        if isinstance(library, Path):
            loaded.append(load_library(library, beside=loaded))
    register_operators(operator.name for operator in manifest.operators)
    programs = {method: _read(path, path) for method, path in files.items()}
    spec = program_spec(programs, manifest, {}, manifest.name)
    return SavedProgram(spec=spec, programs=programs, path=next(iter(files.values())), manifest=manifest)


def _register(path: Path, manifest: Manifest) -> None:
    """Checks that every operator of the program is registered with the schema in the manifest."""
    wanted = {operator.name: operator.schema for operator in manifest.operators}
    register_operators(wanted)
    registered = schemas_of(wanted)
    if missing := [name for name in wanted if name not in registered]:
        raise UsageError(
            f"{path} calls {', '.join(missing)}, which no loaded library defines",
            hint="Name the library with --op-library.",
        )
    for name, schema in wanted.items():
        if registered[name] != schema:
            raise SchemaChangedError(f"{path} was traced with {schema!r}, but {registered[name]} is registered here")


def _read(path: Path, file: Path) -> torch.export.ExportedProgram:
    """Reads a program and explains torch's errors."""
    try:
        program = read_program(file)
    except Exception as error:
        raise ExportError(
            f"torch {torch.__version__} cannot read {path} as an ExportedProgram: {type(error).__name__}: {error}",
            hint="If an operator is unknown, name its library with --op-library.",
        ) from error
    if program.example_inputs is None:
        raise ExportError(f"{path} was saved without its example inputs, which are needed to compile it")
    return program
