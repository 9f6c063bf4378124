"""Describes operator libraries: what one defines, and what it asks of the host, as the manifest records it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import re
import sys
from pathlib import Path
from typing import Literal

from exportkit.child.probe import Registrations, registrations
from exportkit.errors import HostError, LibraryLoadError, NotAnOperatorLibraryError
from exportkit.package.consistency import OPERATORS_DIR
from exportkit.package.elf import Elf, is_stable, oldest_torch, read_elf
from exportkit.package.manifest import Library, Operator


def describe_library(path: Path) -> Library:
    """What the manifest says of an operator library.

    The file is read, and then loaded into another process, to see what it registers. A CUDA library where torch has no
    CUDA cannot be loaded: it is taken to add CUDA kernels to operators that another library defines.

    Args:
        path: The shared library. Its file name becomes its record's.

    Raises:
        NotAnOperatorLibraryError: It is no shared library, or registers nothing.
        LibraryLoadError: It does not load with the torch that is installed here, or ends the process.
        HostError: torch is not installed here.
    """
    path = Path(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise NotAnOperatorLibraryError(f"cannot read the operator library {path}: {error.strerror}") from error
    elf = read_elf(path)
    if not elf.registers_operators:
        raise NotAnOperatorLibraryError(
            f"{path} registers no operators: it calls neither TORCH_LIBRARY's functions nor the stable ABI's",
            hint="Operators that are written in Python cannot travel; define them with TORCH_LIBRARY in C++.",
        )
    torch_version, torch_has_cuda = _installed_torch()
    device: Literal["cpu", "cuda"] = "cuda" if elf.device == "cuda" else "cpu"
    if device == "cuda" and not torch_has_cuda:
        registered = Registrations(defines={}, kernels=("cuda",))
    else:
        registered = _registrations(path, elf)
    platform = f"{sys.platform}-{elf.machine}"
    stable = is_stable(elf.torch_symbols)
    return Library(
        record=f"{OPERATORS_DIR}/{platform}/{path.name}",
        sha256=hashlib.sha256(content).hexdigest(),
        platform=platform,
        device=device,
        kernels=registered.kernels,
        defines=tuple(Operator(name=name, schema=schema) for name, schema in sorted(registered.defines.items())),
        needs_torch=(oldest_torch(elf.torch_symbols) if stable else None) or torch_version,
        torch_bound=None if stable else torch_version,
        needs=elf.host_needs,
    )


def _installed_torch() -> tuple[str, bool]:
    """Minor version of the torch that is installed, such as "2.13", and whether it is a CUDA build; not imported."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise HostError(
            "torch is not installed here, and an operator library can only be described beside one",
            hint="Install torch, or package where the libraries were built.",
        )
    version = ".".join(importlib.metadata.version("torch").split(".")[:2])
    return version, Path(spec.origin).with_name("lib").joinpath("libtorch_cuda.so").exists()


def _registrations(path: Path, elf: Elf) -> Registrations:
    """What the library registers; at least one operator or kernel."""
    try:
        registered = registrations(path)
    except LibraryLoadError as error:
        raise LibraryLoadError(error.message, hint=error.hint or _hint(error.message, elf)) from error
    if not registered.defines and not registered.kernels:
        raise NotAnOperatorLibraryError(f"{path} was loaded, but it defines no operator and adds no kernel to one")
    return registered


def _hint(refusal: str, elf: Elf) -> str:
    """What to do about what the dynamic linker says."""
    if symbol := re.search(r"undefined symbol: (\S+)", refusal):
        if symbol[1] in elf.torch_symbols:
            return "The library was built for another torch. Build it for the one that is installed here."
        return f"Link it with the library that has {symbol[1]}."
    if elf.host_needs:
        return f"Besides torch it needs {', '.join(elf.host_needs)}."
    return "`ldd` lists the libraries it needs that are missing here."
