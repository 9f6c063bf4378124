"""The instruction sets that CPU code is compiled for. csrc/package/targets.cpp says which CPU has which."""

from __future__ import annotations

import platform
from typing import Literal, get_args

from exportkit.errors import UsageError

# As -march takes them, of each machine the oldest first.
CpuIsa = Literal["x86-64-v3", "x86-64-v4", "armv8-a", "armv8.2-a+dotprod", "armv8.2-a+dotprod+sve+bf16"]


# The machine, and the length of vectors in bits. Code for Arm's has NEON's length throughout: torch's classes for SVE
# are for vectors of one length, but Graviton 3 and Grace differ in it. What else a CPU has, the compiler makes use of.
_LEVELS: dict[str | None, tuple[str, int]] = {
    "x86-64-v3": ("x86_64", 256),
    "x86-64-v4": ("x86_64", 512),
    "armv8-a": ("aarch64", 128),
    "armv8.2-a+dotprod": ("aarch64", 128),
    "armv8.2-a+dotprod+sve+bf16": ("aarch64", 128),
}


def cpu_isas_of(machine: str) -> list[CpuIsa]:
    """Returns the instruction sets that are compiled for on a machine such as "aarch64", the default first."""
    return [isa for isa in get_args(CpuIsa) if _LEVELS[isa][0] == machine]


def default_cpu_isa() -> CpuIsa | None:
    """Returns the first of this machine's instruction sets; None, the architecture's baseline, where there is none."""
    return next(iter(cpu_isas_of(platform.machine())), None)


def simd_bits(isa: str | None) -> int | None:
    """Returns the length of an instruction set's vectors; None if it is unknown."""
    return _LEVELS[isa][1] if isa in _LEVELS else None


def check_cpu_isa(isa: str | None) -> None:
    """Checks that this machine's compiler can generate code for an instruction set.

    Raises:
        UsageError: The instruction set is unknown, or belongs to another architecture.
    """
    if isa is None:
        return
    here = platform.machine()
    usable = " or ".join(cpu_isas_of(here)) or "none"
    if isa not in _LEVELS:
        raise UsageError(f"unknown CPU instruction set {isa!r}", hint=f"Use {usable}.")
    if (machine := _LEVELS[isa][0]) != here:
        raise UsageError(
            f"{isa} is for {machine}; this machine is {here}",
            hint=f"Use {usable} here. Export on {machine} for {isa}; `exportkit package` merges the two artifacts.",
        )
