"""Programs for aarch64 on another machine: what compiles them, and what runs them. `make aarch64` is for it."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.made_once import one_maker
from tests.subprocesses import output_of

ROOT = Path(__file__).parents[2]
WANTED = os.environ.get("EXPORTKIT_AARCH64") == "1"  # `make aarch64` says so, when it has built what is below
LIBRARIES = ROOT / "build" / "aarch64" / "exportkit"
STAND_IN = ROOT / "build" / "release-aarch64" / "torch"  # an empty libtorch_cpu.so, which operators ask for
COMPILER = "aarch64-linux-gnu-g++"
EMULATOR = "qemu-aarch64"
ROOT_OF_LIBC = "/usr/aarch64-linux-gnu"  # where Debian's cross-compiler has its C library


@functools.cache
def missing() -> str | None:
    """Why nothing can be run for aarch64 here, or None."""
    if not WANTED:
        return "`make aarch64` runs this"
    absent = [name for name in (COMPILER, EMULATOR) if shutil.which(name) is None]
    if absent:
        return f"there is no {' and no '.join(absent)}: apt-get install g++-aarch64-linux-gnu qemu-user"
    return None


needs_an_emulator = pytest.mark.skipif(missing() is not None, reason=str(missing()))


def emulated(*command: str | Path, cpu: str = "max") -> list[str]:
    """The command that runs one for aarch64 on a CPU such as "neoverse-n1"."""
    return [EMULATOR, "-cpu", cpu, "-L", ROOT_OF_LIBC, *map(str, command)]


def compiled(source: Path, flags: Sequence[str]) -> Path:
    """A program for aarch64. It is compiled once for its content."""
    digest = hashlib.sha256(repr(flags).encode() + source.read_bytes()).hexdigest()[:16]
    program = ROOT / ".cache" / "aarch64" / digest / source.stem
    with one_maker(program) as ours:
        if ours:
            partial = program.with_suffix(".partial")
            command = [COMPILER, str(source), *flags, "-o", str(partial)]
            output_of(*command)
            partial.rename(program)
    return program
