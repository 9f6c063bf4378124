"""Describes an operator library for the manifest: its operators and its requirements on the host."""

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
    """Describes an operator library for the manifest.

    The file is read, and then loaded in another process to find its registrations. A CUDA library cannot be loaded if
    torch has no CUDA; it is then assumed to add CUDA kernels to another library's operators.

    Args:
        path: The shared library. Its file name becomes the record's name.

    Raises:
        NotAnOperatorLibraryError: The file is not a shared library, or it registers nothing.
        LibraryLoadError: The library does not load with the installed torch, or it ends the process.
        HostError: torch is not installed.
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
            hint="Operators in Python cannot be packaged. Define them with TORCH_LIBRARY in C++.",
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
    """Returns the installed torch's minor version, such as "2.13", and whether it has CUDA. Does not import torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise HostError(
            "torch is not installed, and an operator library cannot be described without it",
            hint="Install torch, or run this on the machine that built the library.",
        )
    version = ".".join(importlib.metadata.version("torch").split(".")[:2])
    return version, Path(spec.origin).with_name("lib").joinpath("libtorch_cuda.so").exists()


def _registrations(path: Path, elf: Elf) -> Registrations:
    """Returns the library's registrations. There is at least one operator or kernel."""
    try:
        registered = registrations(path)
    except LibraryLoadError as error:
        raise LibraryLoadError(error.message, hint=error.hint or _hint(error.message, elf)) from error
    if not registered.defines and not registered.kernels:
        raise NotAnOperatorLibraryError(f"{path} was loaded, but it defines no operator and adds no kernel")
    return registered


def _hint(refusal: str, elf: Elf) -> str:
    """Returns advice on an error of the dynamic linker."""
    if symbol := re.search(r"undefined symbol: (\S+)", refusal):
        if symbol[1] in elf.torch_symbols:
            return "The library was built for another torch. Build it for the installed one."
        return f"Link it with the library that defines {symbol[1]}."
    if elf.host_needs:
        return f"Besides torch it needs {', '.join(elf.host_needs)}."
    return "`ldd` lists the missing libraries."
