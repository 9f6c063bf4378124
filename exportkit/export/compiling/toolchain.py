"""Chooses the C++ compiler and the instruction set for AOTInductor."""

from __future__ import annotations

import errno
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._inductor import config, cpp_builder, cpu_vec_isa

from exportkit.errors import CompilerError, HostError
from exportkit.export.cpu_isas import simd_bits
from exportkit.export.within_torch.torch_internals import replaced
from exportkit.package.elf import read_elf

# Needs libstdc++, so that the library shows whether the compiler links it dynamically. It includes no more than that
# takes: every export compiles it.
_PROBE = """#include <exception>
void probe() { throw std::exception(); }
"""


def usable_compiler() -> str:
    """Finds a C++ compiler whose output loads beside torch: $CXX, then g++ on the path, then /usr/bin/g++.

    A compiler that links libstdc++ statically is skipped: the models it compiles crash when they are loaded.

    Raises:
        CompilerError: No compiler can be used. The message gives the reason for each that was tried.
    """
    candidates = [os.environ.get("CXX", ""), "g++", "/usr/bin/g++"]
    found = {path: None for candidate in candidates if candidate and (path := shutil.which(candidate))}
    reasons = [f"$CXX = {candidates[0]}: no such program"] if candidates[0] and not shutil.which(candidates[0]) else []
    for path in found:
        if (reason := objection(path)) is None:
            return path
        reasons.append(f"{path}: {reason}")
    raise CompilerError(
        "found no C++ compiler that AOTInductor can use:"
        + "".join(f"\n    {reason}" for reason in reasons or ["no g++ on the path"]),
        hint="Install g++ (Debian: apt-get install g++), or name one with CXX=/usr/bin/g++.",
    )


@functools.cache
def objection(compiler: str) -> str | None:
    """Says why a compiler cannot be used, or returns None. A process compiles the probe once for each compiler.

    Args:
        compiler: Path of the compiler.
    """
    with tempfile.TemporaryDirectory(prefix="exportkit-compiler-") as folder:
        source, library = Path(folder, "probe.cpp"), Path(folder, "probe.so")
        source.write_text(_PROBE)
        command = [compiler, "-std=c++20", "-shared", "-fPIC", str(source), "-o", str(library)]
        try:  # No time limit: a busy machine compiles slowly, and a model takes longer than this.
            done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
        except OSError as error:
            return f"cannot run it: {error}"
        if done.returncode != 0:
            refuse_full_disk(done.stderr)
            return f"it cannot compile a C++20 library: {last_lines(done.stderr, 3)}"
        if read_elf(library).static_libstdcxx:
            return "it links libstdc++ statically, so its models crash in std::regex when they are loaded"
    return None


def refuse_full_disk(said: object) -> None:
    """Raises HostError if what a compiler or torch said is that the disk is full: no other compiler would help."""
    if os.strerror(errno.ENOSPC) in str(said):
        raise HostError(
            f"no space is left in the temporary folder {tempfile.gettempdir()}, where the compiler works",
            hint="Free about 1 GB there, or name another folder: TMPDIR=/path/with/space.",
        )


@contextmanager
def compiling_for(isa: str | None) -> Iterator[dict[str, Any]]:
    """Yields Inductor options that limit generated code, and the host code around CUDA kernels, to an instruction set.

    By default the code is for the machine that compiles it (-march=native), and an older CPU dies of an illegal
    instruction when it loads the package.

    Args:
        isa: The instruction set, or None for the architecture's baseline.
    """
    options: dict[str, Any] = {
        # Otherwise Inductor compiles and runs a program for each instruction set, which takes seconds.
        "cpp.vec_isa_ok": True,
        "cpp.simdlen": simd_bits(isa) or 128,
    }
    march: str | None = isa or ""
    if hasattr(config.cpp, "march"):  # pytorch#184297 added the option in 2.13
        options["cpp.march"], march = march, None
    flags = replaced(cpp_builder, "_get_optimization_cflags", _with_flags(march))
    # Given the width alone, torch takes the richest instruction set of this CPU: AVX512 with VNNI or AMX, which
    # x86-64-v4 does not have.
    vector = _vector_isa(isa)
    with flags, replaced(cpu_vec_isa, "valid_vec_isa_list", lambda _: lambda: [vector]):
        yield options


def _with_flags(march: str | None) -> Callable[[Any], Any]:
    """Adds flags to torch's own. `march` takes the place of "native"; None: torch knows it.

    g++ makes some symbols unique in the process, among them a pointer of torch's that a model with integer divisions
    writes in each call, so that all models would share it. And the dynamic linker never unmaps a library that has one.
    """

    def wrap(original: Callable[..., tuple[list[str], list[str]]]) -> Callable[..., tuple[list[str], list[str]]]:
        def flags(*args: Any, **kwargs: Any) -> tuple[list[str], list[str]]:
            cflags, ldflags = original(*args, **kwargs)
            if march is not None:
                cflags = [flag for flag in cflags if flag != "march=native"] + [f"march={march}"] * bool(march)
            return [*cflags, *(["fno-gnu-unique"] if cpp_builder.is_gcc() else [])], ldflags

        return flags

    return wrap


@functools.cache
def _vector_isa(isa: str | None) -> cpu_vec_isa.VecISA:
    if isa == "x86-64-v3":
        return cpu_vec_isa.VecAVX2()
    if isa != "x86-64-v4":
        return cpu_vec_isa.VecNEON()

    class PlainAVX512(cpu_vec_isa.VecAVX512):  # without the bfloat16 instructions that `bool` of VecAVX512 probes for
        __hash__ = cpu_vec_isa.VecISA.__hash__  # type: ignore[assignment]  # torch declares an attribute

        def __bool__(self) -> bool:  # type: ignore[override]  # torch wraps its own in functools.cache
            return True

    return PlainAVX512()


def last_lines(text: str, count: int) -> str:
    """Returns the last lines of a compiler's output that report errors, or its last lines."""
    return "\n".join(_errors(text.strip().splitlines())[-count:])


def _errors(lines: Sequence[str]) -> Sequence[str]:
    return [line for line in lines if "error" in line.lower()] or lines


def torch_minor() -> str:
    """Returns this torch's version without the patch number, such as "2.13"."""
    return ".".join(torch.__version__.split(".")[:2])
