"""What a load does with a package's files, short of executing them, under a clock that a test sets."""

from __future__ import annotations

import functools
import os
import warnings
from pathlib import Path

from exportkit import errors
from tests.cpp_reader import CppReader, program


class Cache:
    """The cache of csrc/package, in a process of its own. Each call closes what it opens."""

    def __init__(self) -> None:
        self.set_clock(0)

    def verify(self, package: Path, *, always: bool = False) -> bool:
        """Checks every digest; whether the package was read for that."""
        read: bool = _ask("verify", package, _how(always))
        return read

    def unpack(self, package: Path, kind: str, index: int = 0, *, always: bool = False) -> Path:
        """The folder of a library ("library") or target ("target")."""
        folder, warned = _ask("unpack", package, kind, index, _how(always))
        for text in warned:
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        return Path(folder)

    def set_clock(self, ahead_ns: int) -> None:
        """From now on, the system's clock is so much ahead."""
        _ask("clock", "ahead", ahead_ns)

    def stop_clock(self, at_ns: int) -> None:
        """From now on, the system's clock shows this time."""
        _ask("clock", "stopped", at_ns)


def _how(always: bool) -> str:
    return "always" if always else "once"


@functools.lru_cache(maxsize=1)
def _process() -> CppReader:
    return CppReader(program("check_cache"))


def _ask(*words: object) -> object:
    process = _process()
    process.ask("environment", "EXPORTKIT_CACHE", os.environ["EXPORTKIT_CACHE"])
    said = process.ask(*words)
    if "ok" in said:
        return said["value"]
    raise (
        getattr(errors, said["error"])(said["message"], hint=said["hint"] or None)
        if said["error"]
        else RuntimeError(said["message"])
    )
