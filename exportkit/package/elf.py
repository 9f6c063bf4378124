"""What a shared library says of itself, read from the file: nothing of it is run."""

from __future__ import annotations

import functools
import io
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elftools.common.exceptions import ELFError
from elftools.construct import ConstructError
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerDefSection, GNUVerNeedSection
from elftools.elf.sections import SymbolTableSection

from exportkit.errors import NotAnOperatorLibraryError

_MACHINES = {"EM_X86_64": "x86_64", "EM_AARCH64": "aarch64"}

# A name of c10, at, torch or caffe2 in a mangled C++ symbol: a length and the name. It counts wherever it stands: a
# std::vector<c10::IValue> is as much torch's as c10::IValue.
_CPP_TORCH_NAME = re.compile(r"^_Z.*(?<!\d)(?:3c10|2at|5torch|6caffe2)(?=[\dCDIL])")
_SHIM_NAME = re.compile(r"^(aoti_|torch_)")
_CUDA_SYMBOL = re.compile(
    r"^(aoti_|torch_)\w*cuda|^_ZNK?3c104cuda|^_ZNK?2at4cuda|^cuda[A-Z]|^cu[A-Z]\w+$|^__cudaRegister"
)
_CUDA_LIBRARY = re.compile(
    r"^lib(cuda|cudart|c10_cuda|torch_cuda|cublas|cublasLt|cudnn|cufft|curand|cusparse|cusolver|nvrtc|nvJitLink|nccl)\b"
)
_REGISTRATION_SYMBOL = re.compile(r"^(aoti_torch_library_|torch_library_)|^_ZN5torch7Library")

# What every Linux host has (the manylinux policies' list, shortened), and what torch's wheel brings.
_HOST_LIBRARY = re.compile(
    r"^(lib(c|m|mvec|dl|rt|pthread|util|gcc_s|stdc\+\+|gomp)\.so\b|ld-linux)"
    r"|^lib(torch|torch_cpu|torch_cuda|torch_python|c10|c10_cuda|shm)\.so"
)


@dataclass(frozen=True)
class Elf:
    """A shared library's own account of itself.

    Attributes:
        machine: As `uname -m` says it, such as "x86_64".
        needed: The libraries it asks the dynamic linker for.
        undefined: Names of the symbols that others must have, without versions; weak ones, which may be absent, are
            left out.
        glibc: The newest glibc version among its symbols', such as "2.34"; None where it uses none.
        glibcxx: The same for libstdc++, such as "3.4.29".
        static_libstdcxx: It holds a copy of libstdc++. Compiled models of this kind crash in their constructor, in
            std::regex, when torch's own libstdc++ is another one.
    """

    machine: str
    needed: tuple[str, ...]
    undefined: frozenset[str]
    glibc: str | None
    glibcxx: str | None
    static_libstdcxx: bool

    @property
    def torch_symbols(self) -> frozenset[str]:
        """The undefined symbols that torch must have."""
        return frozenset(name for name in self.undefined if _SHIM_NAME.match(name) or _CPP_TORCH_NAME.match(name))

    @property
    def device(self) -> str:
        """`cuda` if it cannot load, or is of no use, without CUDA; else `cpu`."""
        # Each library that uses the stable ABI's Device type has the constant of every device.
        symbols = self.undefined - {"aoti_torch_device_type_cuda"}
        uses_cuda = any(map(_CUDA_SYMBOL.match, symbols)) or any(map(_CUDA_LIBRARY.match, self.needed))
        return "cuda" if uses_cuda else "cpu"

    @property
    def registers_operators(self) -> bool:
        """Whether it calls one of the functions that define operators or add kernels."""
        return any(map(_REGISTRATION_SYMBOL.match, self.undefined))

    @property
    def host_needs(self) -> tuple[str, ...]:
        """What the host must bring beside torch: "GLIBC_2.34", "GLIBCXX_3.4.29", libraries that not every host has."""
        versions = [f"GLIBC_{self.glibc}"] * bool(self.glibc) + [f"GLIBCXX_{self.glibcxx}"] * bool(self.glibcxx)
        return (*versions, *(name for name in self.needed if not _HOST_LIBRARY.match(name)))


def read_elf(path: Path) -> Elf:
    """Reads a shared library's dynamic section, symbols and versions.

    Raises:
        NotAnOperatorLibraryError: The file is no ELF shared library of a machine that is known here.
        OSError: It cannot be read.
    """
    try:
        return _read(ELFFile(io.BytesIO(path.read_bytes())), path)
    except (ELFError, ConstructError, ValueError, OverflowError) as error:  # the latter two of damaged offsets
        raise NotAnOperatorLibraryError(
            f"{path} is no ELF shared library: {error or 'it does not start as one'}",
            hint="An operator library is a .so file, such as setuptools or CMake leave in their build folder.",
        ) from error


def defined_versions(path: Path, prefix: str) -> list[str]:
    """The versions a library's own symbols have, such as "3.4.30" of libstdc++'s GLIBCXX_3.4.30; oldest first.

    Raises:
        NotAnOperatorLibraryError: The file is no ELF file.
        OSError: It cannot be read.
    """
    try:
        sections = list(ELFFile(io.BytesIO(path.read_bytes())).iter_sections())
        names = [
            auxiliary.name
            for section in sections
            if isinstance(section, GNUVerDefSection)
            for _, auxiliaries in section.iter_versions()
            for auxiliary in auxiliaries
        ]
    except (ELFError, ConstructError, ValueError, OverflowError) as error:
        raise NotAnOperatorLibraryError(f"{path} is no ELF shared library: {error}") from error
    return [".".join(map(str, number)) for number in sorted(set(_numbers(names, prefix)))]


def is_stable(symbols: Iterable[str]) -> bool:
    """Whether undefined symbols ask torch for its C shims only, and so for no particular torch version's C++."""
    return not any(map(_CPP_TORCH_NAME.match, symbols))


def oldest_torch(symbols: Iterable[str]) -> str | None:
    """The oldest torch known to have all of these shims: "2.11", or None if one is newer, or is no shim.

    2.11 is the oldest torch exportkit works with, and the shims of a release are promised to stay for two years.
    """
    return "2.11" if set(symbols) <= stable_abi() else None


@functools.cache
def stable_abi() -> frozenset[str]:
    """The shims that torch 2.11 exports, of CPU and CUDA."""
    lines = Path(__file__).with_name("stable_abi_2.11.txt").read_text().splitlines()
    return frozenset(line for line in lines if not line.startswith("#"))


def _read(elf: ELFFile, path: Path) -> Elf:
    machine = _MACHINES.get(elf["e_machine"])
    if elf["e_type"] != "ET_DYN" or machine is None:
        raise NotAnOperatorLibraryError(
            f"{path} is an ELF file of type {elf['e_type']} for {elf['e_machine']}, not a shared library for "
            f"{' or '.join(_MACHINES.values())}"
        )
    symbols = elf.get_section_by_name(".dynsym")
    needed: list[str] = []
    versions: list[str] = []
    for section in elf.iter_sections():
        if isinstance(section, DynamicSection):
            tags: list[Any] = list(section.iter_tags())  # an entry's value is an attribute named after its tag
            needed += [tag.needed for tag in tags if tag.entry.d_tag == "DT_NEEDED"]
        if isinstance(section, GNUVerNeedSection):
            versions += [auxiliary.name for _, auxiliaries in section.iter_versions() for auxiliary in auxiliaries]
    if not isinstance(symbols, SymbolTableSection):
        raise NotAnOperatorLibraryError(f"{path} has no dynamic symbols (.dynsym): it registers no operators")
    undefined = frozenset(
        symbol.name
        for symbol in symbols.iter_symbols()
        if symbol.name and symbol["st_shndx"] == "SHN_UNDEF" and symbol["st_info"]["bind"] != "STB_WEAK"
    )
    dynamic_cxx = any(name.startswith(("libstdc++", "libc++")) for name in needed)
    return Elf(
        machine=machine,
        needed=tuple(needed),
        undefined=undefined,
        glibc=_newest(versions, "GLIBC_"),
        glibcxx=_newest(versions, "GLIBCXX_"),
        static_libstdcxx=not dynamic_cxx and _holds_libstdcxx(elf),
    )


def _holds_libstdcxx(elf: ELFFile) -> bool:
    """Whether std::exception's type name is among its constants: libstdc++.a brings it, hidden or stripped or not."""
    return any(
        b"\0St9exception\0" in section.data() for section in elf.iter_sections() if section.name.startswith(".rodata")
    )


def _newest(versions: Iterable[str], prefix: str) -> str | None:
    numbers = _numbers(versions, prefix)
    return ".".join(map(str, max(numbers))) if numbers else None


def _numbers(versions: Iterable[str], prefix: str) -> list[tuple[int, ...]]:
    return [
        tuple(map(int, name[len(prefix) :].split("."))) for name in versions if re.fullmatch(prefix + r"[\d.]+", name)
    ]
