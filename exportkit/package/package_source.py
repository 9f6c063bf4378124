"""What a package can be read from: a path, an open file, bytes, or a stream.

csrc/package/opened_file.h has the rules. Bytes and streams are copied once, into memory that is sealed before anything
is checked, so that nobody changes what was checked.
"""

from __future__ import annotations

import fcntl
import io
import os
import stat
from collections.abc import Iterable, Iterator
from ctypes import byref
from typing import Any, Protocol, runtime_checkable

from exportkit.errors import NotAnArchiveError, UsageError
from exportkit.package import core

STREAM_LIMIT = 8 << 30  # bytes of a stream, which may never end
_PIECE = 1 << 20  # bytes


@runtime_checkable
class ReadableFile(Protocol):
    """A file object with bytes, such as a response of HTTP or a member of an archive."""

    def read(self, size: int, /) -> bytes:
        """Returns at most so many bytes, and none at the end."""
        ...


# Whatever has Python's buffer protocol counts as bytes: a numpy array, an mmap.
PackageSource = str | os.PathLike[str] | bytes | bytearray | memoryview | int | ReadableFile


def open_package(source: PackageSource, demand: core.Demand | None, stream_limit: int = STREAM_LIMIT) -> int:
    """Returns a new `ek_package`. `PackageReader` documents the arguments and errors."""
    asked = None if demand is None else byref(demand)
    if isinstance(source, (str, os.PathLike)):
        try:
            return core.handle("ek_package_open", core.encoded(source), asked)
        except NotAnArchiveError as error:
            name = os.fspath(source)
            if str(name) in error.message:
                raise
            raise NotAnArchiveError(f"{name}: {error.message}", hint=error.hint) from None
    if type(stream_limit) is not int or stream_limit < 1:
        raise UsageError(f"stream_limit must be a positive number of bytes, got {stream_limit!r}")
    if isinstance(source, int):
        return _of_descriptor(source, asked, stream_limit)
    if (content := _buffer(source)) is not None:
        return _arrived(f"{content.nbytes} bytes in memory", [content], asked, content.nbytes)
    if not isinstance(source, ReadableFile):
        raise UsageError(
            f"a package cannot be read from a {_kind(source)}",
            hint="Give a path, bytes, a file object that was opened with mode 'rb', or an open descriptor.",
        )
    if (descriptor := _plain_file(source)) is not None:
        return core.handle("ek_package_open_descriptor", descriptor, asked)
    return _arrived(f"a {_kind(source)}", _pieces(source), asked, stream_limit)


def _of_descriptor(descriptor: int, asked: Any, stream_limit: int) -> int:
    if isinstance(descriptor, bool) or not -1 < descriptor < 1 << 31:
        raise UsageError(f"a descriptor is a number of an open file, got {descriptor!r}")
    if not _is_stream(descriptor):
        return core.handle("ek_package_open_descriptor", descriptor, asked)
    # Read by Python, which Ctrl-C interrupts and forks need not wait for.
    stream = io.FileIO(descriptor, closefd=False)
    return _arrived(f"descriptor {descriptor}", _pieces(stream), asked, stream_limit)


def _is_stream(descriptor: int) -> bool:
    """Whether it is a pipe or a socket that can be read. The library says what is wrong with all else but files."""
    try:
        mode, flags = os.fstat(descriptor).st_mode, fcntl.fcntl(descriptor, fcntl.F_GETFL)
    except OSError:
        return False
    readable = not flags & os.O_PATH and flags & os.O_ACCMODE != os.O_WRONLY
    return readable and (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode))


def _buffer(source: object) -> memoryview | None:
    """The memory of bytes and the like; None for what has none."""
    try:
        content = memoryview(source)  # type: ignore[arg-type]  # what is no buffer raises
    except TypeError:
        return None
    except ValueError as error:
        raise UsageError(f"the {_kind(source)} cannot be read: {error}") from error
    if not content.c_contiguous:
        raise UsageError(
            f"the {_kind(source)} is not contiguous: shape {content.shape}, strides {content.strides}",
            hint="`.tobytes()` makes contiguous bytes of it.",
        )
    if isinstance(source, bytes) and len(source) < 4096 and os.path.lexists(source):
        raise UsageError(
            f"bytes are the content of a package, and {source!r} names a file",
            hint="`os.fsdecode` makes a path of them.",
        )
    return content


def _plain_file(file: ReadableFile) -> int | None:
    """The descriptor of a file object that gives what is in a file, from its beginning; None for any other.

    Only Python's own classes: the descriptor of others may be that of a file with other content, such as gzip's.
    """
    raw = file.raw if type(file) is io.BufferedReader else file
    if type(raw) is not io.FileIO or raw.closed or not raw.readable() or not raw.seekable():
        return None
    return raw.fileno() if file.tell() == 0 else None  # type: ignore[attr-defined]  # checked above


def _arrived(name: str, pieces: Iterable[Any], asked: Any, limit: int) -> int:
    import numpy  # gives the address of any memory; a reader of files needs none

    library = core.library()
    arriving = core.handle("ek_arriving_new", core.encoded(name), limit)
    try:
        for piece in pieces:
            if memoryview(piece).nbytes:
                memory = numpy.frombuffer(piece, numpy.uint8)  # which keeps it from being resized meanwhile
                core.call("ek_arriving_write", arriving, memory.ctypes.data, memory.nbytes)
                del memory
        return core.handle("ek_package_open_arrived", arriving, asked)
    finally:
        library.ek_arriving_close(arriving)


def _pieces(file: Any) -> Iterator[bytes | bytearray | memoryview]:
    """What a file object has from its position on. Its word is taken for nothing but what a piece holds."""
    if isinstance(file, io.TextIOBase):
        raise UsageError(f"a {_kind(file)} has text, and a package is bytes", hint="Open the file with mode 'rb'.")
    if getattr(file, "closed", False) is True:
        raise UsageError(f"the {_kind(file)} is closed", hint="Load the package before the file is closed.")
    readinto = getattr(file, "readinto", None)
    buffer = memoryview(bytearray(_PIECE))
    while True:
        if callable(readinto):
            count = readinto(buffer)
            if type(count) is not int or not 0 <= count <= _PIECE:
                raise _refused(file, "readinto", count)
            piece: bytes | bytearray | memoryview = buffer[:count]
        else:
            given = file.read(_PIECE)
            if not isinstance(given, (bytes, bytearray, memoryview)) or not memoryview(given).c_contiguous:
                raise _refused(file, "read", given)
            piece = given
        if not memoryview(piece).nbytes:
            return
        yield piece


def _refused(file: object, method: str, answer: object) -> UsageError:
    if answer is None:
        return UsageError(
            f"the {_kind(file)} has nothing to read now and does not wait: {method} gave None",
            hint="Make it wait (`os.set_blocking`), or collect its bytes and load those.",
        )
    what = f"{answer!r}" if isinstance(answer, int) else f"a {_kind(answer)}"
    return UsageError(f"{method} of the {_kind(file)} gave {what}, not bytes", hint="Open the file with mode 'rb'.")


def _kind(value: object) -> str:
    return type(value).__qualname__
