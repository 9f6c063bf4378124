"""Loads a package as a callable model.

No code of a package runs before its required signatures and all its digests are checked. No library is loaded before
the checks that torch's loader omits: the machine, torch's version, the operators that are already loaded, and that
Python can make the call and the result that the manifest describes.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import warnings
from contextlib import closing
from pathlib import Path
from typing import Literal, get_args

import torch

from exportkit import libraries
from exportkit.errors import HostError, MissingLibraryError, SchemaChangedError, TorchVersionError, UsageError
from exportkit.libraries import LoadedLibrary, load_verified, loaded_library, schemas_of
from exportkit.package import core
from exportkit.package.archive import PackageReader
from exportkit.package.consistency import libraries_for
from exportkit.package.core import SignatureSource
from exportkit.package.manifest import Library, Manifest, Target
from exportkit.package.package_source import STREAM_LIMIT, PackageSource
from exportkit.package.trust import KeySources, demand
from exportkit.runtime import targets
from exportkit.runtime.cache import unpack_library, unpack_target
from exportkit.runtime.graphs import CudaGraphs, graph_use
from exportkit.runtime.methods import ModelCode, plan_methods
from exportkit.runtime.model import Model
from exportkit.runtime.native import RunnerOptions, why_no_graphs
from exportkit.runtime.runner import Construction, runner_class
from exportkit.runtime.weights import mapped_weights

Verify = Literal["once", "always"]


def load(
    source: PackageSource,
    device: str | torch.device = "auto",
    runners: int = 1,
    *,
    public_key: KeySources | None = None,
    signature: SignatureSource | None = None,
    verify: Verify = "once",
    isolate: bool = False,
    target: str | None = None,
    cuda_graphs: CudaGraphs = False,
    stream_limit: int = STREAM_LIMIT,
) -> Model:
    """Loads a package. Needs only torch and the file, not the source of the model or the operators.

    Args:
        source: The path of the `.pt2`, or its content: bytes (or a memoryview, a bytearray and the like), a file object
            that was opened with mode `rb` and is read from its position to its end, or an open descriptor, which stays
            the caller's. Weights of a file on disk are mapped, also by its descriptor. Anything else is copied once,
            into memory that nobody can change, and checked there.
        device: `cpu`, `cuda`, `cuda:<index>`, or `auto`: CUDA if the package has a CUDA target that runs here.
        runners: The number of calls that the compiled code can run at the same time; on a GPU, that it can launch at
            the same time. They share the weights. torch's Python binding holds the GIL during a call (pytorch#197516),
            so with it Python's threads take turns.
        public_key: A PEM file, PEM text, or several of these. One of the keys must have signed the package. The
            policies of this machine add their own requirements.
        signature: The signature file, or its content as bytes, if it is not beside the package under the package's name
            with `.sig`. Beside what has no path there is none.
        verify: `once` hashes only files that are new or may have changed; `exportkit.runtime.cache` has the rules. A
            package that other users may write to is hashed each time. `always` hashes everything again.
        isolate: Runs the package in a worker process. The package may then contain a different build of operators that
            this process has already loaded, and a crash becomes an error here. Each call copies its tensors through
            shared memory.
        target: The name of the target to run. None takes the best target that runs here.
        cuda_graphs: Runs calls on a GPU as CUDA graphs: as one launch instead of one per kernel. True: calls of any
            sizes, up to 64 of each method, of which the first takes longer. A list of sizes, such as
            `[{"batch": 1, "gh": 28, "gw": 28}]`: these, of all methods that have just these dimensions, while the
            package is loaded, and those that `Model.capture` gets later. Answers have the same bits. What cannot be a
            graph runs without one; `Model.cuda_graphs` has the reason. Launches take turns, whatever `runners` is.
        stream_limit: How many bytes of a stream are taken, which may never end.

    Returns:
        The model. Close it, or leave its `with` block, to free its memory and the file.

    Raises:
        UsageError: The file or the target does not exist, the source cannot be read, or an argument is invalid.
        PackageError: The package lacks a required signature, breaks a rule of the format or was changed, or its
            operator libraries conflict with loaded ones. The class says which.
        PolicyError: A policy of this machine cannot be read or trusted.
        NoTargetError: No target runs here. The message gives a reason for each.
        TorchVersionError: An operator library needs another torch.
        ModelLoadError: torch's loader refused the compiled code.
        CacheError: There is no room to unpack the package.
        HostError: There are no CUDA graphs here.
        ModelRunError: Calls with sizes that `cuda_graphs` lists cannot be a graph.
    """
    _check(runners, verify)
    if isolate:
        from exportkit.runtime.isolated import load_isolated  # most processes never need it

        asked = {"public_key": public_key, "signature": signature, "verify": verify, "target": target}
        how = {"runners": runners, "device": device, "cuda_graphs": cuda_graphs}
        return load_isolated(source, stream_limit=stream_limit, **asked, **how)
    make_forks_safe()
    reader = PackageReader(source, demand=demand(public_key, signature), stream_limit=stream_limit)
    return load_opened(reader, device, runners, verify=verify, target=target, cuda_graphs=cuda_graphs)


def load_opened(
    reader: PackageReader,
    device: str | torch.device = "auto",
    runners: int = 1,
    *,
    verify: Verify = "once",
    target: str | None = None,
    cuda_graphs: CudaGraphs = False,
) -> Model:
    """Loads an open package whose signatures were checked. Arguments and errors are the same as for `load`.

    The model takes over the open package. If loading fails, the package is closed.
    """
    try:
        _check(runners, verify)
        make_forks_safe()
        kind, always = runner_class(), verify == "always"
        reader.verify_once(always=always)
        candidates = targets.named(reader.manifest.targets, target)
        host = targets.host_for(candidates, str(device))
        choice = targets.survey_package(reader, candidates, str(device), host).fitting[0]
        if choice.fit == "ptx":
            warnings.warn(
                f"{choice.target.name} has no code for the GPU {choice.device}: the driver compiles its PTX, "
                "which makes the first load slower. Export for this GPU to have code of its own.",
                stacklevel=3,
            )
        options = RunnerOptions(runners, graph_use(cuda_graphs))
        _check_graphs(options, choice)
        device = torch.device(choice.device)
        plans = plan_methods(reader.manifest, device)
        if device.type == "cuda":
            torch.cuda.init()  # lets torch recognise forks, which cannot use CUDA
        _load_operators(reader, choice.target, always=always)
        entries = {name: unpack_target(reader, choice.target, name, always=always) for name in plans}
        written = {name: plan.written for name, plan in plans.items()}
        construction = Construction(kind, entries, choice, options, written, reader.name)
        code = construction.make(mapped_weights(reader))
        reader.check_unchanged()  # unpacking read the package again
        model = Model(reader, choice.target, ModelCode(reader, plans, device, code), construction)
        for sizes in () if isinstance(cuda_graphs, bool) else cuda_graphs:
            model.capture_all(sizes)
        return model
    except BaseException:
        reader.close()
        raise


def _check(runners: int, verify: str) -> None:
    if isinstance(runners, bool) or not isinstance(runners, int) or runners < 1:
        raise UsageError(f"runners must be a positive integer, got {runners!r}")
    if verify not in get_args(Verify):
        raise UsageError(f"verify must be 'once' or 'always', got {verify!r}")


def _check_graphs(options: RunnerOptions, choice: targets.Choice) -> None:
    if options.graphs == "none":
        return
    if choice.target.device == "cpu":
        said = f"cuda_graphs is for a model on CUDA; target {choice.target.name} is for the CPU"
        hint = "Load it without cuda_graphs (--cuda-graphs), or with device='cuda' (--device cuda)."
        raise UsageError(said, hint=hint)
    if reason := why_no_graphs():
        raise HostError(
            f"there are no CUDA graphs here: {reason}",
            hint="`make build` builds the C++ runtime with them where torch and its headers are for CUDA.",
        )


def _load_operators(reader: PackageReader, target: Target, *, always: bool) -> None:
    """Loads the target's operator libraries and compares every operator of the graph with the manifest."""
    libraries = libraries_for(reader.manifest, target)
    for library in libraries:
        if reason := targets.library_rejection(library, torch.__version__):
            raise TorchVersionError(
                f"the operator library {Path(library.record).name} does not work here: {reason}",
                hint="Install the torch it works with, or build it for the stable ABI (torch/csrc/stable).",
            )
    beside: list[LoadedLibrary] = []
    for library in libraries:
        schemas = {operator.name: operator.schema for operator in library.defines}
        namespaces = {name.partition("::")[0] for name in schemas}
        loaded = loaded_library(library.sha256, reader.record(library.record).size, defines=namespaces)
        if loaded is None:
            with closing(unpack_library(reader, library, always=always)) as entry:
                loaded = load_verified(
                    entry.library, library.sha256, defines=namespaces, schemas=schemas, beside=beside
                )
        beside.append(loaded)
    _define_missing(reader.manifest, libraries)
    _check_operators(reader.manifest, libraries)


def _define_missing(manifest: Manifest, libraries: tuple[Library, ...]) -> None:
    """Defines the operators that a library adds kernels to and that Python defined where the package was made."""
    added = {name for library in libraries for name in library.adds_to or ()}
    schemas = {op.name: op.schema for op in manifest.operators if op.name in added}
    for name in sorted(schemas.keys() - schemas_of(schemas).keys()):
        try:
            torch.library.define(name, schemas[name].removeprefix(name))
        except (RuntimeError, ValueError) as error:
            raise SchemaChangedError(
                f"the operator {name} cannot be defined here: torch cannot read {schemas[name]!r}",
                hint="Import what defines it in Python before the package is loaded.",
            ) from error


def _check_operators(manifest: Manifest, libraries: tuple[Library, ...]) -> None:
    """Checks that every operator of the graph is registered with the schema that the manifest records."""
    registered = schemas_of(operator.name for operator in manifest.operators)
    for operator in manifest.operators:
        if operator.name not in registered:
            names = ", ".join(Path(library.record).name for library in libraries) or "none"
            raise MissingLibraryError(
                f"operator {operator.name} is not loaded, and no library of the package gives it (libraries: {names})",
                hint="`exportkit package` adds the library; `--op-library` names one that is not exportkit's own.",
            )
        if registered[operator.name] != operator.schema:
            raise SchemaChangedError(
                f"operator {operator.name} is registered as {registered[operator.name]}; the package was made with "
                f"{operator.schema}",
                hint="Export again with the library that is loaded, or load the one that the package was made with.",
            )


# --- forks: a lock that another thread holds during one would never be released in the child --------------------------


_OMP_PAUSE_HARD = 2  # omp_pause_hard of OpenMP 5.0


@functools.lru_cache(maxsize=1)
def make_forks_safe() -> None:
    """Makes every later `os.fork` wait until no thread runs exportkit's C++ code, and end OpenMP's idle threads.

    GNU's OpenMP library does not support forks: in the child, it and torch's operators would wait forever for the
    parent's threads. Both processes start new threads when they need them.
    """
    with contextlib.suppress(OSError, AttributeError):  # other OpenMP libraries support forks
        end_threads = ctypes.CDLL("libgomp.so.1").omp_pause_resource_all
        os.register_at_fork(before=lambda: end_threads(_OMP_PAUSE_HARD))
    os.register_at_fork(before=_before, after_in_parent=lambda: _after(0), after_in_child=lambda: _after(1))


def _before() -> None:
    libraries.loading.acquire()  # first, because its holder may be about to call exportkit's C++ code
    core.library().ek_before_fork()


def _after(child: int) -> None:
    core.library().ek_after_fork(child)
    libraries.loading.release()
