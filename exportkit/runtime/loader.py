"""From a package to a model that can be called.

Nothing of the package is executed before every digest holds, and no library before what torch's own loader leaves
unchecked is known to fit: the machine, torch's version, the operators that are loaded already.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from exportkit.errors import MissingLibraryError, ModelLoadError, SchemaChangedError, TorchVersionError, UsageError
from exportkit.libraries import load_verified, loaded_library, schemas_of
from exportkit.package.archive import PackageReader
from exportkit.package.consistency import libraries_for
from exportkit.package.manifest import Library, Manifest, Target
from exportkit.runtime import targets
from exportkit.runtime.cache import unpacked
from exportkit.runtime.model import Model

if TYPE_CHECKING:
    from torch._C._aoti import AOTIModelPackageLoader


def load(path: str | os.PathLike[str], device: str | torch.device = "auto", runners: int = 1) -> Model:
    """Loads a package: needs torch and the file, nothing of the model's or the operators' source.

    Args:
        path: The `.pt2`.
        device: `cpu`, `cuda`, `cuda:<index>`, or `auto`: CUDA if the package has a target for it that runs here.
        runners: How many calls the compiled code can run at a time; they share the weights. torch's Python binding
            holds the GIL during a call (pytorch#197516), so Python's own threads take turns all the same.

    Returns:
        The model. Close it, or leave its `with` block, to free its memory and the file.

    Raises:
        UsageError: There is no such file, or an argument means nothing.
        PackageError: The package breaks a rule of the format, was changed, or its operator libraries cannot be loaded
            beside what is loaded already; the class says which.
        NoTargetError: No target runs here; the message gives the reason for each.
        TorchVersionError: An operator library works with another torch only.
        ModelLoadError: torch's loader refused the compiled code.
    """
    if isinstance(runners, bool) or not isinstance(runners, int) or runners < 1:
        raise UsageError(f"runners must be a whole number from 1, got {runners!r}")
    reader = PackageReader(Path(path))
    try:
        reader.verify()
        manifest = reader.manifest
        choice = _choose(manifest, str(device))
        _load_operators(reader, choice.target)
        loader = _construct(reader, choice, runners)
        reader.check_unchanged()  # torch read the file once more
        return Model(reader, choice.target, torch.device(choice.device), loader)
    except BaseException:
        reader.close()
        raise


def _choose(manifest: Manifest, device: str) -> targets.Choice:
    kind, _ = targets.parse_device(device)
    with_cuda = kind != "cpu" and any(target.device == "cuda" for target in manifest.targets)
    host = targets.host(with_cuda=with_cuda)
    return targets.pick(
        manifest.targets, device, host, current_cuda=torch.cuda.current_device() if host.capabilities else 0
    )


def _load_operators(reader: PackageReader, target: Target) -> None:
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
        namespaces = {operator.name.partition("::")[0] for operator in library.defines}
        if loaded_library(library.sha256, sizes[library.record], defines=namespaces) is None:
            load_verified(unpacked(reader, library), library.sha256, defines=namespaces)
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


def _construct(reader: PackageReader, choice: targets.Choice, runners: int) -> AOTIModelPackageLoader:
    """The runners of the one target that was chosen.

    Not through aoti_load_package, which builds every target's runner, compiles instruction set probes with g++ for
    seconds (pytorch#191715), and hides why an operator is missing.
    """
    _promote_libstdcxx()
    # The file that was checked, even if the path leads to another one by now.
    path = f"/proc/self/fd/{reader.fileno()}"
    try:
        return torch._C._aoti.AOTIModelPackageLoader(path, choice.target.name, False, runners, choice.device_index)
    except RuntimeError as error:
        raise ModelLoadError(
            f"torch {torch.__version__} cannot load target {choice.target.name} of {reader.path.name}: "
            f"{str(error).partition(chr(10))[0]}",
            hint="It unpacks the code into a temporary directory (TMPDIR), which must have room and may not be noexec.",
        ) from error


@functools.lru_cache(maxsize=1)
def _promote_libstdcxx() -> None:
    """Makes the process's libstdc++ visible to all libraries.

    torch's loader crashes in std::regex where a model's library brings parts of its own libstdc++ along (linked
    statically by the compiler it was built with), unless the real one is found first.
    """
    with contextlib.suppress(OSError):  # no such library: then torch itself was built with another one
        ctypes.CDLL("libstdc++.so.6", mode=ctypes.RTLD_GLOBAL)
