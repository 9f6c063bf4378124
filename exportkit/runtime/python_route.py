"""Loading without the C++ runtime."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from exportkit.errors import MissingLibraryError, SchemaChangedError, TorchVersionError
from exportkit.libraries import load_verified, loaded_library, schemas_of
from exportkit.package.archive import PackageReader
from exportkit.package.consistency import libraries_for
from exportkit.package.manifest import Library, Manifest, Target
from exportkit.package.trust import KeySource, check_trust
from exportkit.runtime import targets
from exportkit.runtime.cache.entries import library_contents, unpack
from exportkit.runtime.cache.trust import verify_package
from exportkit.runtime.model import Model
from exportkit.runtime.runner import construct
from exportkit.runtime.weights import mapped_weights


def load_python(
    path: Path,
    device: str,
    name: str | None,
    runners: int,
    keys: list[KeySource] | None,
    signature: str | None,
    *,
    again: bool,
) -> Model:
    """As `loader.load`, of whose arguments these are what is left once they are checked."""
    reader = PackageReader(path)
    try:
        check_trust(reader, keys, signature)
        verify_package(reader, again=again)
        manifest = reader.manifest
        candidates = targets.named(manifest.targets, name)
        choice = targets.pick(candidates, device, targets.host_for(candidates, device))
        _load_operators(reader, choice.target, again=again)
        construct_with = partial(construct, reader, choice, runners, again=again)
        runner = construct_with(mapped_weights(reader) if manifest.weights else {})
        reader.check_unchanged()  # what was unpacked was read once more
        return Model(reader, choice.target, torch.device(choice.device), runner, construct_with)
    except BaseException:
        reader.close()
        raise


def _load_operators(reader: PackageReader, target: Target, *, again: bool) -> None:
    """Loads the target's operator libraries, and holds every operator of the graph against the manifest."""
    libraries = libraries_for(reader.manifest, target)
    for library in libraries:
        if reason := targets.library_rejection(library, torch.__version__):
            raise TorchVersionError(
                f"the operator library {Path(library.record).name} does not work here: {reason}",
                hint="Install the torch it works with, or build it for the stable ABI (torch/csrc/stable).",
            )
    sizes = {record.name: record.size for record in reader.manifest.records}
    for library in libraries:
        schemas = {operator.name: operator.schema for operator in library.defines}
        namespaces = {name.partition("::")[0] for name in schemas}
        if loaded_library(library.sha256, sizes[library.record], defines=namespaces) is None:
            contents = library_contents(reader, library)
            with unpack(reader, contents, again=again) as entry:
                (name,) = contents.records
                load_verified(entry.folder / name, library.sha256, defines=namespaces, schemas=schemas)
    _check_operators(reader.manifest, libraries)


def _check_operators(manifest: Manifest, libraries: tuple[Library, ...]) -> None:
    """Every operator of the graph is registered with the schema that the graph was traced with."""
    registered = schemas_of(operator.name for operator in manifest.operators)
    for operator in manifest.operators:
        if operator.name not in registered:
            names = ", ".join(Path(library.record).name for library in libraries) or "none"
            raise MissingLibraryError(
                f"operator {operator.name} is not loaded, and no library of the package gives it (libraries: {names})",
                hint="`exportkit package` adds the library; `--op-library` names one that is not exportkit's own.",
            )
        # Parsed, since the text of a schema may differ from one torch to another in no more than spelling.
        if torch._C.parse_schema(registered[operator.name]) != torch._C.parse_schema(operator.schema):
            raise SchemaChangedError(
                f"operator {operator.name} is registered as {registered[operator.name]}; the package was made with "
                f"{operator.schema}",
                hint="Export again with the library that is loaded, or load the one that the package was made with.",
            )
