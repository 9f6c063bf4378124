"""Packages given as other things than paths, and the file objects that strangers write."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from fcntl import F_ADD_SEALS, F_SEAL_GROW, F_SEAL_SHRINK, F_SEAL_WRITE, fcntl
from pathlib import Path
from typing import Any

import numpy as np

Giving = contextlib.AbstractContextManager[Any]


class Reads:
    """A file object that has only `read`, and gives what it is told to."""

    def __init__(self, *answers: Any) -> None:
        self.answers, self.asked = list(answers), 0

    def read(self, size: int) -> Any:
        self.asked += 1
        return self.answers.pop(0) if self.answers else b""


class ReadsInto(Reads):
    """The same for `readinto`: what is not a number is written, whether it fits or not."""

    def readinto(self, buffer: memoryview) -> Any:
        answer = self.read(len(buffer))
        if not isinstance(answer, bytes):
            return answer
        buffer[: len(answer)] = answer
        return len(answer)


def pieces(content: bytes, size: int) -> list[bytes]:
    return [content[at : at + size] for at in range(0, len(content), size)]


@contextlib.contextmanager
def _pipe(path: Path) -> Iterator[int]:
    """It is written to meanwhile, and closed."""
    out, into = os.pipe()

    def write() -> None:
        with open(into, "wb") as file:
            file.write(path.read_bytes())

    thread = threading.Thread(target=write)
    thread.start()
    yield out
    thread.join()
    os.close(out)


@contextlib.contextmanager
def _descriptor(path: Path, at: int = 0) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    os.lseek(descriptor, at, os.SEEK_SET)
    yield descriptor
    os.close(descriptor)


@contextlib.contextmanager
def _memfd(path: Path, seals: int) -> Iterator[int]:
    descriptor = os.memfd_create("package", os.MFD_ALLOW_SEALING)
    os.write(descriptor, path.read_bytes())
    fcntl(descriptor, F_ADD_SEALS, seals)
    yield descriptor
    os.close(descriptor)


@contextlib.contextmanager
def _within(path: Path) -> Iterator[Any]:
    """A file object that stands where the package begins."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"before" + path.read_bytes())
        file.flush()
        with open(file.name, "rb") as found:
            found.seek(len("before"))
            yield found


@contextlib.contextmanager
def _gzipped(path: Path) -> Iterator[gzip.GzipFile]:
    with tempfile.NamedTemporaryFile() as file:
        file.write(gzip.compress(path.read_bytes(), 1))
        file.flush()
        with gzip.open(file.name) as found:
            assert found.fileno() >= 0  # of the file with other content
            yield found


def _given(make: Callable[[bytes], Any]) -> Callable[[Path], Giving]:
    return lambda path: contextlib.nullcontext(make(path.read_bytes()))


# By a name for the test, what gives the package of a path in another way.
SOURCES: dict[str, Callable[[Path], Giving]] = {
    "bytes": _given(bytes),
    "bytearray": _given(bytearray),
    "part of a memoryview": _given(lambda content: memoryview(b"x" + content + b"x")[1:-1]),
    "numpy": _given(lambda content: np.frombuffer(content, np.uint8)),
    "BytesIO": _given(io.BytesIO),
    "file": lambda path: path.open("rb"),
    "unbuffered file": lambda path: path.open("rb", buffering=0),
    "file from its position": _within,
    "gzip": _gzipped,
    "short reads": _given(lambda content: Reads(*pieces(content, 999))),
    "short reads into": _given(lambda content: ReadsInto(*pieces(content, 4097))),
    "pieces of many kinds": _given(
        lambda content: Reads(memoryview(content)[:7], bytearray(content[7:90]), content[90:])
    ),
    "descriptor": _descriptor,
    "descriptor at its end": lambda path: _descriptor(path, at=path.stat().st_size),
    "pipe": _pipe,
    "sealed memfd": lambda path: _memfd(path, F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW),
    "memfd": lambda path: _memfd(path, 0),
}
