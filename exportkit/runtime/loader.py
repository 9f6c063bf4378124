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
from typing import TYPE_CHECKING, Literal, get_args

import torch

from exportkit.errors import UsageError
from exportkit.package.archive import PackageReader
from exportkit.package.consistency import libraries_for
from exportkit.runtime import targets
from exportkit.runtime.fork import survive_forks
from exportkit.runtime.model import Model
from exportkit.runtime.native import NativePackage, use_native
from exportkit.runtime.runner import construct

# What few loads need is imported where they do: modules are most of what a load takes.
if TYPE_CHECKING:
    from exportkit.package.trust import KeySource, KeySources

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
    keys = None
    if public_key is not None:
        from exportkit.package.trust import key_sources

        keys = key_sources(public_key)
    # The C++ runtime speaks UTF-8, and not every file's name is.
    texts = (path, *(keys or ()), signature or "", target or "")
    native = use_native() and all(_is_utf8(os.fspath(each)) for each in texts)
    named = None if signature is None else os.fspath(signature)
    if native:
        return _load_native(Path(path), str(device), target, runners, keys, named, again=again)
    from exportkit.runtime.python_route import load_python

    return load_python(Path(path), str(device), target, runners, keys, named, again=again)


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
