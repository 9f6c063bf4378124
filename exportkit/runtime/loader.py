"""From a package to a model that can be called.

Nothing of the package is executed before it is known to be signed as the caller and this machine's policies ask, and
every digest holds; and no library before what torch's own loader leaves unchecked is known to fit: the machine, torch's
version, the operators that are loaded already.
"""

from __future__ import annotations

import os
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import torch

from exportkit.errors import MissingLibraryError, SchemaChangedError, TorchVersionError, UsageError
from exportkit.libraries import load_verified, loaded_library, schemas_of
from exportkit.package.archive import PackageReader
from exportkit.package.consistency import libraries_for
from exportkit.package.manifest import Library, Manifest, Target
from exportkit.package.trust import KeySource, KeySources, check_trust, key_sources
from exportkit.runtime import targets
from exportkit.runtime.cache.entries import library_contents, unpack
from exportkit.runtime.cache.trust import verify_package
from exportkit.runtime.fork import survive_forks
from exportkit.runtime.model import Model
from exportkit.runtime.native import NativePackage, use_native
from exportkit.runtime.runner import construct
from exportkit.runtime.weights import mapped_weights

Verify = Literal["once", "always"]


def load(
    path: str | os.PathLike[str],
    device: str | torch.device = "auto",
    runners: int = 1,
    *,
    public_key: KeySources | None = None,
    signature: str | os.PathLike[str] | None = None,
    verify: Verify = "once",
    isolate: bool = False,
    target: str | None = None,
) -> Model:
    """Loads a package: needs torch and the file, nothing of the model's or the operators' source.

    Args:
        path: The `.pt2`.
        device: `cpu`, `cuda`, `cuda:<index>`, or `auto`: CUDA if the package has a target for it that runs here.
        runners: How many calls the compiled code can run at a time; they share the weights. torch's Python binding
            holds the GIL during a call (pytorch#197516), so Python's own threads take turns all the same.
        public_key: Whoever must have signed the package: a PEM file, PEM text, or several, of which any will do. What
            this machine's policies ask for is asked for as well.
        signature: The signature file, where it is not the package's name with `.sig`.
        verify: `once` hashes what was not seen to hold before, or may have been changed since, by what the file system
            says of it: `exportkit.runtime.cache` has the rules. A package that other users may write to is hashed each
            time. `always` hashes everything again.
        isolate: Loads and runs the package in a worker process: it may bring another build of operators that this
            process has, and a crash of it is an error here. Each call copies its tensors, through shared memory.
        target: The name of the target to run, such as one of those that `exportkit verify` found to differ. None takes
            the best one that runs here.

    Returns:
        The model. Close it, or leave its `with` block, to free its memory and the file.

    Raises:
        UsageError: There is no such file or target, or an argument means nothing.
        PackageError: The package is not signed as it must be, breaks a rule of the format, was changed, or its operator
            libraries cannot be loaded beside what is loaded already; the class says which.
        PolicyError: A policy of this machine cannot be read.
        NoTargetError: No target runs here; the message gives the reason for each.
        TorchVersionError: An operator library works with another torch only.
        ModelLoadError: torch's loader refused the compiled code.
        CacheError: There is no room to unpack it.
    """
    arguments = dict(locals())  # all of them, so that the worker process misses none that is added
    if isinstance(runners, bool) or not isinstance(runners, int) or runners < 1:
        raise UsageError(f"runners must be a whole number from 1, got {runners!r}")
    if verify not in get_args(Verify):
        raise UsageError(f"verify must be 'once' or 'always', got {verify!r}")
    if arguments.pop("isolate"):
        from exportkit.runtime.isolated import load_isolated  # most processes never need it

        return load_isolated(**arguments)
    again = verify == "always"
    keys = None if public_key is None else key_sources(public_key)
    # The C++ runtime speaks UTF-8, and not every file's name is.
    texts = (path, *(keys or ()), signature or "", target or "")
    native = use_native() and all(_is_utf8(os.fspath(each)) for each in texts)
    route = _load_native if native else _load_python
    named = None if signature is None else os.fspath(signature)
    return route(Path(path), str(device), target, runners, keys, named, again=again)


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _load_native(
    path: Path,
    device: str,
    name: str | None,
    runners: int,
    keys: list[KeySource] | None,
    signature: str | None,
    *,
    again: bool,
) -> Model:
    """Through the C++ runtime. Python reads what the model says of itself, from the file that was checked."""
    key_texts = [os.fspath(key) for key in keys or ()]
    with closing(NativePackage(str(path), device, name, runners, key_texts, signature or "", again=again)) as opened:
        reader = PackageReader(path, file=opened.file)
        try:
            if reader.manifest_sha256 != opened.manifest_sha256:
                raise reader.changed()
            target = next(target for target in reader.manifest.targets if target.name == opened.target)
            where = torch.device(opened.device)
            if where.type == "cuda":
                torch.cuda.init()  # torch then knows a fork of this process for what cannot use CUDA
            survive_forks()
            opened.load_operators(libraries_for(reader.manifest, target))
            runner = opened.load_target()
            choice = targets.Choice(target, -1 if where.index is None else where.index)
            return Model(reader, target, where, runner, partial(construct, reader, choice, runners, again=again))
        except BaseException:
            reader.close()
            raise


def _load_python(
    path: Path,
    device: str,
    name: str | None,
    runners: int,
    keys: list[KeySource] | None,
    signature: str | None,
    *,
    again: bool,
) -> Model:
    """The same without the C++ runtime."""
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
