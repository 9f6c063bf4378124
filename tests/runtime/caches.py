"""Python's cache and the C++ runtime's behind one face: what one of them verified, the other must know."""

from __future__ import annotations

import functools
import os
import time
import warnings
from pathlib import Path
from typing import Protocol

import pytest

from exportkit import errors
from exportkit.package.archive import PackageReader
from exportkit.runtime.cache.entries import library_contents, target_contents, unpack
from exportkit.runtime.cache.trust import verify_package
from tests.cpp_reader import CppReader, program


class Cache(Protocol):
    """What a load does with a package's files, short of executing them. Each call closes what it opens."""

    def verify(self, package: Path, *, again: bool = False) -> bool:
        """Checks every digest; whether the package was read for that."""

    def unpack(self, package: Path, kind: str, index: int = 0, *, again: bool = False) -> Path:
        """The folder of a library ("library") or target ("target")."""

    def set_clock(self, ahead_ns: int) -> None:
        """From now on, the system's clock is so much ahead."""

    def stop_clock(self, at_ns: int) -> None:
        """From now on, the system's clock shows this time."""


class PythonCache:
    """exportkit.runtime.cache."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self._time_ns = time.time_ns

    def verify(self, package: Path, *, again: bool = False) -> bool:
        read = []

        class Reader(PackageReader):
            def verify(self) -> None:
                read.append(self)
                super().verify()

        with Reader(package) as reader:
            verify_package(reader, again=again)
        return bool(read)

    def unpack(self, package: Path, kind: str, index: int = 0, *, again: bool = False) -> Path:
        with PackageReader(package) as reader:
            if kind == "library":
                contents = library_contents(reader, reader.manifest.libraries[index])
            else:
                contents = target_contents(reader, reader.manifest.targets[index])
            with unpack(reader, contents, again=again) as entry:
                return entry.folder

    def set_clock(self, ahead_ns: int) -> None:
        self._monkeypatch.setattr(time, "time_ns", lambda: self._time_ns() + ahead_ns)

    def stop_clock(self, at_ns: int) -> None:
        self._monkeypatch.setattr(time, "time_ns", lambda: at_ns)


class CppCache:
    """csrc/runtime/cache.cpp and trust_records.cpp, in a process of their own."""

    def __init__(self) -> None:
        self.set_clock(0)

    def verify(self, package: Path, *, again: bool = False) -> bool:
        read: bool = _ask("verify", package, _how(again))
        return read

    def unpack(self, package: Path, kind: str, index: int = 0, *, again: bool = False) -> Path:
        folder, warned = _ask("unpack", package, kind, index, _how(again))
        for text in warned:
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        return Path(folder)

    def set_clock(self, ahead_ns: int) -> None:
        _ask("clock", "ahead", ahead_ns)

    def stop_clock(self, at_ns: int) -> None:
        _ask("clock", "stopped", at_ns)


def _how(again: bool) -> str:
    return "always" if again else "once"


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
