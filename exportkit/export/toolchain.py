"""The C++ compiler AOTInductor is given, and the instruction set it compiles for."""

from __future__ import annotations

import functools
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._inductor import config, cpp_builder, cpu_vec_isa

from exportkit.errors import CompilerError, UsageError
from exportkit.export.export_options import CpuIsa
from exportkit.package.elf import read_elf

_SIMD_BITS = {"x86-64-v3": 256, "x86-64-v4": 512}

# Uses the part of libstdc++ that a model compiled against a private copy of it crashes in.
_PROBE = """#include <regex>
#include <string>
bool probe(const std::string& text) { return std::regex_match(text, std::regex(text)); }
"""


def usable_compiler() -> str:
    """The first C++ compiler whose output loads beside torch: $CXX, then g++, then the system's own.

    A compiler that links libstdc++ statically is passed over: the model it makes crashes when it is loaded.

    Raises:
        CompilerError: There is none; the message has a reason for each that was tried.
    """
    candidates = [os.environ.get("CXX", ""), "g++", "/usr/bin/g++"]
    found = {path: None for candidate in candidates if candidate and (path := shutil.which(candidate))}
    reasons = [f"$CXX = {candidates[0]}: no such program"] if candidates[0] and not shutil.which(candidates[0]) else []
    for path in found:
        if (reason := objection(path)) is None:
            return path
        reasons.append(f"{path}: {reason}")
    raise CompilerError(
        "no C++ compiler that AOTInductor could use:"
        + "".join(f"\n    {reason}" for reason in reasons or ["no g++ on the path"]),
        hint="Install g++ (Debian: apt-get install g++), or name one with CXX=/usr/bin/g++.",
    )


@functools.cache
def objection(compiler: str) -> str | None:
    """Why a compiler, by its path, cannot be used; None if it can. Compiles a probe, once a process."""
    with tempfile.TemporaryDirectory(prefix="exportkit-compiler-") as folder:
        source, library = Path(folder, "probe.cpp"), Path(folder, "probe.so")
        source.write_text(_PROBE)
        command = [compiler, "-std=c++20", "-shared", "-fPIC", str(source), "-o", str(library)]
        try:  # without a limit in seconds: a loaded machine compiles slowly, and the model would take longer still
            done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
        except OSError as error:
            return f"it does not run: {error}"
        if done.returncode != 0:
            return f"it cannot compile a C++20 library: {last_lines(done.stderr, 3)}"
        if read_elf(library).static_libstdcxx:
            return "it links libstdc++ statically, and a model compiled so crashes in std::regex when it is loaded"
    return None


def default_cpu_isa() -> CpuIsa | None:
    """x86-64-v3 on x86-64; elsewhere code is for the architecture's baseline, which has no name here."""
    return "x86-64-v3" if platform.machine() == "x86_64" else None


def check_cpu_isa(isa: str | None) -> None:
    """Whether this machine's compiler can make such code.

    Raises:
        UsageError: It is no instruction set of this architecture.
    """
    if isa is None:
        return
    if isa not in _SIMD_BITS:
        raise UsageError(f"there is no CPU instruction set {isa!r}", hint=f"Give {' or '.join(_SIMD_BITS)}.")
    if platform.machine() != "x86_64":
        raise UsageError(
            f"{isa} is for x86-64; this machine is {platform.machine()}", hint="Leave the instruction set out."
        )


@contextmanager
def compiling_for(isa: str | None) -> Iterator[dict[str, Any]]:
    """Inductor options that keep generated code, and the host code around CUDA kernels, to an instruction set.

    Without them the code is for the machine that compiled it (-march=native), and an older CPU dies of an illegal
    instruction inside the loader.
    """
    march = isa or ""
    options: dict[str, Any] = {
        "cpp.vec_isa_ok": True,  # else every instruction set is probed with compiled programs, which takes seconds
        "cpp.simdlen": _SIMD_BITS[isa] if isa else 128,
    }
    with ExitStack() as patches:
        if hasattr(config.cpp, "march"):
            options["cpp.march"] = march
        else:  # torch 2.11; pytorch#184297 added the option in 2.13
            patches.enter_context(mock.patch.object(cpp_builder, "_get_optimization_cflags", _with_march(march)))
        # By its width alone torch would take the richest instruction set of this CPU: AVX512 with VNNI or AMX, which
        # x86-64-v4 does not have.
        patches.enter_context(mock.patch.object(cpu_vec_isa, "valid_vec_isa_list", _only(_vector_isa(isa))))
        yield options


def _with_march(march: str) -> Any:
    original = cpp_builder._get_optimization_cflags

    def flags(*args: Any, **kwargs: Any) -> tuple[list[str], list[str]]:
        cflags, ldflags = original(*args, **kwargs)
        kept = [flag for flag in cflags if flag != "march=native"]
        return (kept + [f"march={march}"] if march else kept), ldflags

    return flags


def _only(isa: cpu_vec_isa.VecISA) -> Callable[[], list[cpu_vec_isa.VecISA]]:
    return lambda: [isa]


@functools.cache
def _vector_isa(isa: str | None) -> cpu_vec_isa.VecISA:
    if isa == "x86-64-v3":
        return cpu_vec_isa.VecAVX2()
    if isa is None:
        return cpu_vec_isa.VecNEON()

    class PlainAVX512(cpu_vec_isa.VecAVX512):  # without the bfloat16 instructions that the truth test probes for
        __hash__ = cpu_vec_isa.VecISA.__hash__  # type: ignore[assignment]

        def __bool__(self) -> bool:  # type: ignore[override]
            return True

    return PlainAVX512()


def last_lines(text: str, count: int) -> str:
    """The end of a compiler's output, where the error is."""
    return "\n".join(_errors(text.strip().splitlines())[-count:])


def _errors(lines: Sequence[str]) -> Sequence[str]:
    return [line for line in lines if "error" in line.lower()] or lines


def torch_minor() -> str:
    """`2.13`."""
    return ".".join(torch.__version__.split(".")[:2])
