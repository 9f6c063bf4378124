"""Describes an operator library for the manifest: its operators and its requirements on the host."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import NamedTuple

from msgspec import UNSET

from exportkit.child.probe import Kernels, Registrations, registrations
from exportkit.errors import HostError, LibraryLoadError, NotAnOperatorLibraryError
from exportkit.package.consistency import OPERATORS_DIR
from exportkit.package.elf import Elf, is_stable, oldest_torch, read_elf
from exportkit.package.manifest import Library, Operator


def describe_library(path: Path) -> Library:
    """Describes one operator library. Arguments and errors are the same as for `describe_with_needed`."""
    return describe_with_needed(path)[-1][1]


def describe_with_needed(path: Path) -> tuple[tuple[Path, Library], ...]:
    """Describes an operator library for the manifest, and the libraries that must come with it.

    These are the libraries that its RPATH or RUNPATH finds, except those of every Linux host, of torch and of CUDA. The
    files are read, and then loaded in another process to find their registrations. A library that needs a torch with
    CUDA cannot be loaded without one. If it defines no operators, it is then assumed to add CUDA kernels to those of
    another library.

    Args:
        path: The shared library. Its file name becomes the record's name.

    Returns:
        The files and their descriptions in loading order. The library itself is the last.

    Raises:
        NotAnOperatorLibraryError: The file is not a shared library, or it registers nothing.
        LibraryLoadError: The library does not load with the installed torch, or it ends the process. Or it cannot be
            loaded from a package.
        HostError: torch is not installed.
    """
    path = Path(path)
    chain = _loading_order(path)
    elf = chain[path.name].elf
    if not elf.registers_operators:
        others = [name for name, file in chain.items() if file.elf.registers_operators]
        raise NotAnOperatorLibraryError(
            f"{path} registers no operators: it calls neither TORCH_LIBRARY's functions nor the stable ABI's",
            hint=f"It needs {', '.join(others)}: give that instead."
            if others
            else "Give the library whose code defines the operators, or adds kernels to them.",
        )
    torch_version, torch_has_cuda = _installed_torch()
    if not torch_has_cuda and any(file.elf.needs_torch_cuda for file in chain.values()):
        _refuse_unknown_definitions(chain)
        registered: Sequence[Registrations | None] = [None] * len(chain)
        kernels = [_ASSUMED if file.elf.registers_operators else () for file in chain.values()]
    else:
        registered = known = _registrations(path, chain)
        kernels = [each.kernels for each in known]
    only_cuda = kernels[-1] == ("cuda",) and not (registered[-1] and registered[-1].defines)
    return tuple(
        (file.path, _describe(file, each, kinds, torch_version, only_cuda=only_cuda))
        for file, each, kinds in zip(chain.values(), registered, kernels)
    )


_ASSUMED: tuple[Kernels, ...] = ("cuda",)
"""What a library that only torch with CUDA can load is taken to add, to operators that are not known."""


class _File(NamedTuple):
    path: Path
    elf: Elf


def _describe(
    file: _File, registered: Registrations | None, kernels: tuple[Kernels, ...], torch_version: str, *, only_cuda: bool
) -> Library:
    platform = f"{sys.platform}-{file.elf.machine}"
    stable = is_stable(file.elf.torch_symbols)
    defines = registered.defines if registered else {}
    others = sorted(registered.adds.keys() - defines.keys()) if registered else ()
    return Library(
        record=f"{OPERATORS_DIR}/{platform}/{file.path.name}",
        sha256=hashlib.sha256(file.path.read_bytes()).hexdigest(),
        platform=platform,
        device="cuda" if only_cuda and not defines and "cpu" not in kernels else "cpu",
        kernels=kernels,
        defines=tuple(Operator(name=name, schema=schema) for name, schema in sorted(defines.items())),
        adds_to=tuple(others) if others else UNSET,
        needs_torch=(oldest_torch(file.elf.torch_symbols) if stable else None) or torch_version,
        torch_bound=None if stable else torch_version,
        needs=file.elf.host_needs,
    )


def _loading_order(path: Path, inherited: Sequence[Path] = (), users: Set[str] = frozenset()) -> dict[str, _File]:
    """Returns the libraries that come with a library, and the library, by name, each after those that it needs."""
    try:
        elf = read_elf(path)
    except OSError as error:
        raise NotAnOperatorLibraryError(f"cannot read the operator library {path}: {error.strerror}") from error
    origin = str(path.absolute().parent)
    own = [Path(entry.replace("${ORIGIN}", origin).replace("$ORIGIN", origin)) for entry in elf.search_path]
    folders = [*own, *inherited]  # the linker looks into an RPATH for what a needed library needs, too
    order: dict[str, _File] = {}
    for name in elf.uncommon:
        found = next((folder / name for folder in folders if (folder / name).is_file()), None)
        if found is None or name in order or name in users:
            continue
        order |= _loading_order(found, folders, {*users, path.name})
        if (soname := order[name].elf.soname) != name:
            raise LibraryLoadError(
                f"{path.name} needs {found}, which cannot be loaded from a package: its soname is "
                f"{'missing' if soname is None else soname}",
                hint=f"Link it with -Wl,-soname,{name}, or link it into {path.name} statically.",
            )
    order.pop(path.name, None)
    return {**order, path.name: _File(path, elf)}


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


def _refuse_unknown_definitions(chain: Mapping[str, _File]) -> None:
    """Refuses a library that defines operators, if this torch, which has no CUDA, cannot load it to see which ones."""
    if defining := [name for name, file in chain.items() if file.elf.defines_operators]:
        needing = next(name for name, file in chain.items() if file.elf.needs_torch_cuda)
        raise LibraryLoadError(
            f"{defining[-1]} cannot be loaded to see which operators it defines: {needing} needs a torch with CUDA, "
            "and the installed torch is a CPU build",
            hint="Run this with a torch that has CUDA, or give a build of the library without CUDA.",
        )


def _registrations(path: Path, chain: Mapping[str, _File]) -> tuple[Registrations, ...]:
    """Returns what the libraries register. The last one has at least one operator or kernel."""
    try:
        registered = registrations(*(file.path for file in chain.values()))
    except LibraryLoadError as error:
        raise LibraryLoadError(error.message, hint=error.hint or _hint(error.message, chain[path.name].elf)) from error
    if not registered[-1].defines and not registered[-1].adds:
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
