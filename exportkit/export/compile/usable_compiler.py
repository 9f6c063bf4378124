"""Finds the C++ compiler. Importing this does not import torch."""

from __future__ import annotations

import errno
import functools
import os
import shutil
import subprocess
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

from exportkit.errors import CompilerError, HostError
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
    """Says why a compiler cannot be used, or returns None. A process compiles the probe once for each compiler."""
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


def look_for_compiler() -> None:
    """Tries the compilers in a thread, for `usable_compiler` to know later, and leaves it to that to complain."""

    def look() -> None:
        with suppress(CompilerError, HostError):
            usable_compiler()

    threading.Thread(target=look, daemon=True).start()


def last_lines(text: str, count: int) -> str:
    """Returns the last lines of a compiler's output that report errors, or its last lines."""
    lines = text.strip().splitlines()
    errors = [line for line in lines if "error" in line.lower()]
    return "\n".join((errors or lines)[-count:])
