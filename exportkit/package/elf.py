"""Reads the properties of a shared library from its file, without running it."""

from __future__ import annotations

import ctypes
import functools
import io
import mmap
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
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
from exportkit.support import OLDEST_TORCH

_LARGE = 64 << 20  # bytes
_MACHINES = {"EM_X86_64": "x86_64", "EM_AARCH64": "aarch64"}

# A namespace of torch's in a mangled C++ symbol: a length and c10, at, torch or caffe2. It may stand anywhere in the
# symbol, because std::vector<c10::IValue> depends on torch like c10::IValue.
_CPP_TORCH_NAME = re.compile(r"^_Z.*(?<!\d)(?:3c10|2at|5torch|6caffe2)(?=[\dCDIL])")
_SHIM_NAME = re.compile(r"^(aoti_|torch_)")
_TORCH_CUDA_SYMBOL = re.compile(r"^(aoti_|torch_)\w*cuda|^_ZNK?3c104cuda|^_ZNK?2at4cuda")
_TORCH_CUDA_LIBRARY = re.compile(r"^lib(torch|c10)_cuda\b")
_CUDA_SYMBOL = re.compile(r"^cuda[A-Z]|^cu[A-Z]\w+$|^__cudaRegister")
_CUDA_LIBRARY = re.compile(
    r"^lib(cuda|cudart|cublas|cublasLt|cudnn|cufft|curand|cusparse|cusolver|nvrtc|nvJitLink|nccl)\b"
)
_REGISTRATION_SYMBOL = re.compile(
    r"^(aoti_torch_library_|torch_library_)|^_ZN5torch7Library|^_ZN3c1017RegisterOperators"
)
# These define one operator. Unoptimised code of the stable ABI names those that open a library in any case.
_DEFINITION_SYMBOL = re.compile(
    r"^(aoti_torch_library|torch_library)_def$|^_ZNR5torch7Library4_defE|^_ZN3c1017RegisterOperators"
)

# Libraries that every Linux host has (a short form of the manylinux policies' list) or that every torch contains.
_HOST_LIBRARY = re.compile(
    r"^(lib(c|m|mvec|dl|rt|pthread|util|gcc_s|stdc\+\+|gomp)\.so\b|ld-linux)|^lib(torch|torch_cpu|torch_python|c10|shm)\.so"
)


@dataclass(frozen=True)
class Elf:
    """The properties of a shared library.

    Attributes:
        machine: The machine, as `uname -m` prints it, such as "x86_64".
        soname: The name that it has for the dynamic linker once it is loaded, or None.
        needed: The libraries that the dynamic linker must load first.
        search_path: The folders of its RPATH or RUNPATH, where `$ORIGIN` is its own folder.
        undefined: The names, without versions, of the symbols that other libraries must define. Weak symbols are left
            out, because they may be absent.
        glibc: The newest glibc version that its symbols need, such as "2.34", or None.
        glibcxx: The newest libstdc++ version that its symbols need, such as "3.4.29", or None.
        static_libstdcxx: Whether it contains a copy of libstdc++. Such compiled models crash in their constructor, in
            std::regex, if torch uses another libstdc++.
    """

    machine: str
    soname: str | None
    needed: tuple[str, ...]
    search_path: tuple[str, ...]
    undefined: frozenset[str]
    glibc: str | None
    glibcxx: str | None
    static_libstdcxx: bool

    @property
    def torch_symbols(self) -> frozenset[str]:
        """The undefined symbols that torch must define."""
        return frozenset(name for name in self.undefined if _SHIM_NAME.match(name) or _CPP_TORCH_NAME.match(name))

    @property
    def needs_torch_cuda(self) -> bool:
        """Whether it loads only beside a torch with CUDA."""
        # Every library that uses the stable ABI's Device or Tag refers to the constants of all devices or tags.
        symbols = self.undefined - {"aoti_torch_device_type_cuda", "torch_tag_cudagraph_unsafe"}
        if any(map(_TORCH_CUDA_SYMBOL.match, symbols)) or any(map(_TORCH_CUDA_LIBRARY.match, self.needed)):
            return True
        # Without a library that has CUDA's functions, it finds those that torch loaded.
        return any(map(_CUDA_SYMBOL.match, symbols)) and not any(map(_CUDA_LIBRARY.match, self.needed))

    @property
    def registers_operators(self) -> bool:
        """Whether the library calls a function that defines operators or adds kernels."""
        return any(map(_REGISTRATION_SYMBOL.match, self.undefined))

    @property
    def defines_operators(self) -> bool:
        """Whether the library calls a function that defines operators."""
        return any(map(_DEFINITION_SYMBOL.match, self.undefined))

    @property
    def host_needs(self) -> tuple[str, ...]:
        """The host's requirements besides torch: "GLIBC_2.34", "GLIBCXX_3.4.29", and uncommon libraries."""
        versions = [f"GLIBC_{self.glibc}"] * bool(self.glibc) + [f"GLIBCXX_{self.glibcxx}"] * bool(self.glibcxx)
        libraries = [name for name in self.needed if not _HOST_LIBRARY.match(name)]
        if self.needs_torch_cuda and not any(map(_TORCH_CUDA_LIBRARY.match, libraries)):
            libraries.append("libtorch_cuda.so")
        return (*versions, *libraries)

    @property
    def uncommon(self) -> tuple[str, ...]:
        """The needed libraries that neither every Linux host, nor torch, nor CUDA has."""
        known = (_HOST_LIBRARY, _TORCH_CUDA_LIBRARY, _CUDA_LIBRARY)
        return tuple(name for name in self.needed if not any(pattern.match(name) for pattern in known))


def read_elf(path: Path) -> Elf:
    """Reads a shared library's dynamic section, symbols and versions.

    Raises:
        NotAnOperatorLibraryError: The file is not an ELF shared library of a known machine.
        OSError: The file cannot be read.
    """
    try:
        with _content(path) as content:
            return _read(ELFFile(content), path)
    except (ELFError, ConstructError, ValueError, OverflowError) as error:  # damaged offsets cause the last two
        raise NotAnOperatorLibraryError(
            f"{path} is not an ELF shared library: {error or 'its start is not an ELF header'}",
            hint="An operator library is a .so file, such as setuptools or CMake make in their build folder.",
        ) from error


@contextmanager
def _content(path: Path) -> Iterator[Any]:
    """Yields a file's content, which is mapped if it is large: CUDA's libraries have up to a gigabyte."""
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size < _LARGE:
            yield io.BytesIO(file.read())
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            yield mapped


def defined_versions(path: Path, prefix: str) -> list[str]:
    """Returns the versions of a library's symbols, such as "3.4.30" for GLIBCXX_3.4.30, oldest first.

    Raises:
        NotAnOperatorLibraryError: The file is not an ELF file.
        OSError: The file cannot be read.
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
        raise NotAnOperatorLibraryError(f"{path} is not an ELF shared library: {error}") from error
    return [".".join(map(str, number)) for number in sorted(set(_numbers(names, prefix)))]


def is_stable(symbols: Iterable[str]) -> bool:
    """Whether undefined symbols need only torch's C shims, and not the C++ of one torch version."""
    return not any(map(_CPP_TORCH_NAME.match, symbols))


def oldest_torch(symbols: Iterable[str]) -> str | None:
    """Returns the oldest torch that exportkit supports if it has all of these shims, else None.

    torch promises to keep a release's shims for two years.
    """
    return OLDEST_TORCH if set(symbols) <= stable_abi() else None


@functools.cache
def stable_abi() -> frozenset[str]:
    """Returns the shims that the oldest torch exports, for CPU and CUDA."""
    lines = Path(__file__).with_name(f"stable_abi_{OLDEST_TORCH}.txt").read_text().splitlines()
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
    search_path: list[str] = []
    soname: str | None = None
    versions: list[str] = []
    for section in elf.iter_sections():
        if isinstance(section, DynamicSection):
            tags: list[Any] = list(section.iter_tags())  # the value of an entry is the attribute with its tag's name
            needed += [tag.needed for tag in tags if tag.entry.d_tag == "DT_NEEDED"]
            soname = next((tag.soname for tag in tags if tag.entry.d_tag == "DT_SONAME"), soname)
            search_path += [tag.rpath for tag in tags if tag.entry.d_tag == "DT_RPATH"]
            search_path += [tag.runpath for tag in tags if tag.entry.d_tag == "DT_RUNPATH"]
        if isinstance(section, GNUVerNeedSection):
            versions += [auxiliary.name for _, auxiliaries in section.iter_versions() for auxiliary in auxiliaries]
    if not isinstance(symbols, SymbolTableSection):
        raise NotAnOperatorLibraryError(f"{path} has no dynamic symbols (.dynsym), so it registers no operators")
    undefined = frozenset(
        symbol.name
        for symbol in symbols.iter_symbols()
        if symbol.name and symbol["st_shndx"] == "SHN_UNDEF" and symbol["st_info"]["bind"] != "STB_WEAK"
    )
    dynamic_cxx = any(name.startswith(("libstdc++", "libc++")) for name in needed)
    return Elf(
        machine=machine,
        soname=soname,
        needed=tuple(needed),
        search_path=tuple(folder for entry in search_path for folder in entry.split(":") if folder),
        undefined=undefined,
        glibc=_newest(versions, "GLIBC_"),
        glibcxx=_newest(versions, "GLIBCXX_"),
        static_libstdcxx=not dynamic_cxx and _holds_libstdcxx(elf),
    )


def _holds_libstdcxx(elf: ELFFile) -> bool:
    """Whether the constants contain std::exception's type name, which libstdc++.a adds even if hidden or stripped."""
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


def demangled(symbol: str) -> str:
    """Returns the name of a C++ symbol without its parameters; any other symbol as it is."""
    status = ctypes.c_int(1)
    try:
        library = ctypes.CDLL("libstdc++.so.6")
    except OSError:
        return symbol
    demangle, free = library.__cxa_demangle, library.free
    demangle.restype, demangle.argtypes = ctypes.c_void_p, (ctypes.c_char_p, *[ctypes.c_void_p] * 3)
    free.argtypes = (ctypes.c_void_p,)
    text = demangle(symbol.encode(), None, None, ctypes.addressof(status))
    if not text or status.value:
        return symbol
    try:
        return ctypes.string_at(text).decode().partition("(")[0]
    finally:
        free(text)
