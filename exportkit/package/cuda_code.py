"""Finds out which GPUs machine code is for, by what the code itself says.

A GPU's number does not tell: compilers make code for sm_90a on an sm_90, which no other GPU runs. NVIDIA documents
neither of the marks below; tests hold them to what nvcc writes. What a fat binary has compressed, its headers tell.
"""

from __future__ import annotations

import io
import mmap
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
from elftools.common.exceptions import ELFError
from elftools.construct import ConstructError
from elftools.elf.elffile import ELFFile

from exportkit.package import core

_CUDA = 190  # EM_CUDA
# The magic number, 64 bits, little-endian, and CUDA as the system: 0x33 up to CUDA 12, 0x41 since.
_START = re.compile(rb"\x7fELF\x02\x01\x01[\x33\x41]")
_OLD_SPECIFIC = 0x800  # of the flags up to CUDA 12
_OLD_ABI = 7
_COMPATIBILITY, _SPECIFIC_ATTRIBUTE = ".nv.compat", 9
_SIZED = 4  # the form of an attribute that has its own length
_TOOLS = ".note.nv.tkinfo"  # has the assembler's command line
_ARGUMENT = re.compile(rb"(?:-arch|--gpu-name)[ =]sm_(\d+)([af]?)")

Degree = Literal["native", "ptx", "no"]


@dataclass(frozen=True)
class DeviceCode:
    """What a library has for GPUs.

    Attributes:
        machine: The architectures of its machine code, such as {"sm_80", "sm_90a"}.
        ptx: Those of its PTX.
    """

    machine: frozenset[str] = frozenset()
    ptx: frozenset[str] = frozenset()

    def __str__(self) -> str:
        """Such as "sm_80, sm_90a and PTX of sm_90"; empty without code."""
        machine, ptx = (", ".join(sorted(names, key=_in_order)) for names in (self.machine, self.ptx))
        return " and ".join(filter(None, (machine, ptx and f"PTX of {ptx}")))


def arch_list(architectures: Iterable[str]) -> str:
    """Returns architectures as TORCH_CUDA_ARCH_LIST names them, such as "8.0;9.0a"."""
    return ";".join(re.sub(r"sm_(\d+)(\d)", r"\1.\2", name) for name in sorted(set(architectures), key=_in_order))


def device_code(content: bytes) -> DeviceCode:
    """Returns what a library has for GPUs: in fat binaries, as nvcc makes them, or as code objects alone."""
    entries = msgspec.json.decode(core.text("ek_fat_entries", content, len(content)), type=list[tuple[str, bool]])
    machine = {name for name, is_ptx in entries if not is_ptx} | set(_in_content(content))
    return DeviceCode(frozenset(machine), frozenset(name for name, is_ptx in entries if is_ptx))


def degree(code: DeviceCode, architecture: str) -> Degree:
    """Returns how code runs on the GPU that an architecture is named after: natively, by PTX, or not.

    Machine code runs on later GPUs of its generation; with the suffix a, on its own alone. The driver compiles PTX for
    any later GPU.
    """
    machine, ptx = (" ".join(sorted(names)).encode() for names in (code.machine, code.ptx))
    return msgspec.convert(core.text("ek_gpu_degree", machine, ptx, architecture.encode()).decode(), Degree)


def _in_order(architecture: str) -> tuple[int, str]:
    return int(architecture.removeprefix("sm_").rstrip("af")), architecture


def cuda_architectures(files: Iterable[Path]) -> frozenset[str]:
    """Returns the architectures of the machine code in files, such as {"sm_80", "sm_90a"}; empty if there is none."""
    return frozenset(name for file in files for name in _in_file(file))


def strictest(architectures: Iterable[str], device: str) -> str:
    """Returns the architecture that all code of a target runs on: a specific one, if any code is for it alone.

    Args:
        architectures: Those of the code.
        device: That of the GPU it was compiled for, such as "sm_90".
    """
    specific = [name for name in sorted(architectures) if name.rstrip("af") == device and name != device]
    return specific[0] if specific else device


def _in_file(file: Path) -> Iterator[str]:
    if file.stat().st_size == 0:
        return
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
        yield from _in_content(content)


def _in_content(content: bytes | mmap.mmap) -> Iterator[str]:
    starts = [match.start() for match in _START.finditer(content)]
    for start, end in zip(starts, [*starts, len(content)][1:], strict=True):
        name = _architecture(content[start:end])
        if name is not None:
            yield name


def _architecture(code: bytes) -> str | None:
    """Returns the architecture of a code object; None if it is none."""
    try:
        elf = ELFFile(io.BytesIO(code))
        if elf["e_machine"] not in ("EM_CUDA", _CUDA):
            return None
        flags = elf["e_flags"]
        if elf["e_ident"]["EI_ABIVERSION"] <= _OLD_ABI:
            return f"sm_{flags & 0xFF}" + ("a" if flags & _OLD_SPECIFIC else "")
        number, tools = flags >> 8 & 0xFF, elf.get_section_by_name(_TOOLS)
        said = _ARGUMENT.search(tools.data()) if tools is not None else None
        if said is not None and int(said[1]) == number and said[2]:
            return f"sm_{number}{said[2].decode()}"
        marks = elf.get_section_by_name(_COMPATIBILITY)
        return f"sm_{number}" + ("a" if marks is not None and _is_specific(marks.data()) else "")
    except (ELFError, ConstructError, ValueError, UnicodeDecodeError):
        return None


def _is_specific(marks: bytes) -> bool:
    """Whether marks say that only one architecture runs the code. Each mark is a form, a number and a value."""
    at = 0
    while at + 4 <= len(marks):
        form, number, value = marks[at], marks[at + 1], int.from_bytes(marks[at + 2 : at + 4], "little")
        if number == _SPECIFIC_ATTRIBUTE and form != _SIZED:
            return value != 0
        at += 4 + (value if form == _SIZED else 0)
    return False
