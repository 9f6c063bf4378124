"""Chooses the instruction set for AOTInductor."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._inductor import config, cpp_builder, cpu_vec_isa

from exportkit.export.cpu_isas import simd_bits
from exportkit.export.torch_patches.patched import Function, patched


@contextmanager
def compiling_for(isa: str | None) -> Iterator[dict[str, Any]]:
    """Yields Inductor options that limit generated code, and the host code around CUDA kernels, to an instruction set.

    By default the code is for the machine that compiles it (-march=native), and an older CPU dies of an illegal
    instruction when it loads the package.
    """
    options: dict[str, Any] = {
        # Otherwise Inductor compiles and runs a program for each instruction set, which takes seconds.
        "cpp.vec_isa_ok": True,
        "cpp.simdlen": simd_bits(isa) or 128,
    }
    march: str | None = isa or ""
    if hasattr(config.cpp, "march"):  # pytorch#184297 added the option in 2.13
        options["cpp.march"], march = march, None
    flags = patched("cpp_builder._get_optimization_cflags", functools.partial(_with_flags, march))
    # Given the width alone, torch takes the richest instruction set of this CPU: AVX512 with VNNI or AMX, which
    # x86-64-v4 does not have.
    vector = _vector_isa(isa)
    with flags, patched("cpu_vec_isa.valid_vec_isa_list", lambda _: [vector]):
        yield options


def _with_flags(march: str | None, original: Function, *args: Any, **kwargs: Any) -> tuple[list[str], list[str]]:
    """Adds flags to torch's own. `march` takes the place of "native"; None: torch knows it.

    Integers wrap, as eager's do: what overflows is undefined in C++ (docs/upstream/wrapping-integers.md).
    g++ makes some symbols unique in the process, among them a pointer of torch's that a model with integer divisions
    writes in each call, so that all models would share it. And the dynamic linker never unmaps a library that has one.
    """
    cflags, ldflags = original(*args, **kwargs)
    if march is not None:
        cflags = [flag for flag in cflags if flag != "march=native"] + [f"march={march}"] * bool(march)
    return [*cflags, "fwrapv", *(["fno-gnu-unique"] if cpp_builder.is_gcc() else [])], ldflags


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


def torch_minor() -> str:
    """Returns this torch's version without the patch number, such as "2.13"."""
    return ".".join(torch.__version__.split(".")[:2])
