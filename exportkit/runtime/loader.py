"""From a package to a model that can be called.

Nothing of the package is executed before it is known to be signed as the caller and this machine's policies ask, and
every digest holds; and no library before what torch's own loader leaves unchecked is known to fit: the machine, torch's
version, the operators that are loaded already, and that Python can make the call and the result which the manifest
describes.
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
from exportkit.package.trust import KeySources, demand
from exportkit.runtime import targets
from exportkit.runtime.cache import unpack_library, unpack_target
from exportkit.runtime.fork import make_forks_safe
from exportkit.runtime.inputs import InputPlan
from exportkit.runtime.model import Model
from exportkit.runtime.runner import construct, runner_class
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
    _check(runners, verify)
    if isolate:
        from exportkit.runtime.isolated import load_isolated  # most processes never need it

        asked = {"public_key": public_key, "signature": signature, "verify": verify, "target": target}
        return load_isolated(path, runners=runners, device=device, **asked)
    make_forks_safe()
    reader = PackageReader(Path(path), demand=demand(public_key, signature))
    return load_opened(reader, device, runners, verify=verify, target=target)


def load_opened(
    reader: PackageReader,
    device: str | torch.device = "auto",
    runners: int = 1,
    *,
    verify: Verify = "once",
    target: str | None = None,
) -> Model:
    """What `load` does with a package once it is known to be signed by whom it must be; its arguments and errors.

    The open package is the model's then, and closed where this fails.
    """
    try:
        _check(runners, verify)
        make_forks_safe()
        kind, always = runner_class(), verify == "always"
        reader.verify_once(always=always)
        candidates = targets.named(reader.manifest.targets, target)
        choice = targets.pick(candidates, str(device), targets.host_for(candidates, str(device)))
        plan = InputPlan(reader.manifest.call, torch.device(choice.device))
        if plan.device.type == "cuda":
            torch.cuda.init()  # torch then knows a fork of this process for what cannot use CUDA
        _load_operators(reader, choice.target, always=always)
        entry = unpack_target(reader, choice.target, always=always)
        construct_with = partial(construct, kind, entry, choice, runners, reader.path.name)
        runner = construct_with(mapped_weights(reader))
        reader.check_unchanged()  # what was unpacked was read once more
        return Model(reader, choice.target, plan, runner, construct_with)
    except BaseException:
        reader.close()
        raise


def _check(runners: int, verify: str) -> None:
    if isinstance(runners, bool) or not isinstance(runners, int) or runners < 1:
        raise UsageError(f"runners must be a whole number from 1, got {runners!r}")
    if verify not in get_args(Verify):
        raise UsageError(f"verify must be 'once' or 'always', got {verify!r}")


def _load_operators(reader: PackageReader, target: Target, *, always: bool) -> None:
    """Loads the target's operator libraries, and holds every operator of the graph against the manifest."""
    libraries = libraries_for(reader.manifest, target)
    for library in libraries:
        if reason := targets.library_rejection(library, torch.__version__):
            raise TorchVersionError(
                f"the operator library {Path(library.record).name} does not work here: {reason}",
                hint="Install the torch it works with, or build it for the stable ABI (torch/csrc/stable).",
            )
    for library in libraries:
        schemas = {operator.name: operator.schema for operator in library.defines}
        namespaces = {name.partition("::")[0] for name in schemas}
        if loaded_library(library.sha256, reader.record(library.record).size, defines=namespaces) is None:
            with closing(unpack_library(reader, library, always=always)) as entry:
                load_verified(entry.library, library.sha256, defines=namespaces, schemas=schemas)
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
