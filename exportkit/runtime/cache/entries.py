"""What is unpacked from packages: operator libraries and targets' files, once for all processes."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import os
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from typing_extensions import Self

from exportkit.errors import CacheError
from exportkit.package.archive import PackageReader
from exportkit.package.atomic import temporary_folder
from exportkit.package.consistency import AOTINDUCTOR_DIR
from exportkit.package.manifest import Library, Record, Target
from exportkit.runtime.cache import cache_directory
from exportkit.runtime.cache.trust import (
    EntryRecord,
    FileState,
    VerifiedFile,
    is_verified,
    private_folder,
    read_record,
    state_if_content,
    touch,
    write_record,
)

LIBRARIES, TARGETS = "libraries", "targets"  # the folders of entries
RECORD = "~verified.json"
_WRITERS_LOCK = "~lock"
_LOCK_PATIENCE = 60.0  # seconds; a writer that was stopped is not waited for any longer
_RACES = 20  # how often an entry may be deleted while it is being unpacked


class Contents(NamedTuple):
    """What an entry is to hold.

    Attributes:
        kind: The folder it is in, LIBRARIES or TARGETS.
        digest: Its name there.
        records: Of the package, by the names of their files.
    """

    kind: str
    digest: str
    records: Mapping[str, Record]


class Entry:
    """An unpacked entry that is in use: `prune` leaves it alone until it is closed, or the process ends."""

    def __init__(self, folder: Path, fd: int) -> None:
        self.folder = folder
        self._fd = fd

    def close(self) -> None:
        """Gives it up."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def library_contents(reader: PackageReader, library: Library) -> Contents:
    """An operator library, as the only file of its entry."""
    name = library.record.rpartition("/")[2]
    return Contents(LIBRARIES, library.sha256, {name: reader.record(library.record)})


def target_contents(reader: PackageReader, target: Target) -> Contents:
    """The files of a target."""
    folder = f"{AOTINDUCTOR_DIR}/{target.name}/"
    records = {name.removeprefix(folder): reader.record(name) for name in reader.names if name.startswith(folder)}
    lines = (f"{record.sha256}  {name}\n" for name, record in sorted(records.items()))
    return Contents(TARGETS, hashlib.sha256("".join(lines).encode()).hexdigest(), records)


def unpack(reader: PackageReader, contents: Contents, *, again: bool) -> Entry:
    """The entry with this content, unpacked if it is not there yet.

    Where the cache cannot be used, a warning says why and a temporary directory takes its place.

    Args:
        reader: The package that has the content.
        contents: What it is to hold.
        again: Whether to hash files that count as verified.

    Raises:
        PackageError: A record does not hold.
        CacheError: There is no room in the temporary directory either.
    """
    try:
        return _unpack_in(cache_directory(), reader, contents, again)
    except OSError as error:
        reason = _reason(error)
    warnings.warn(
        f"exportkit cannot use its cache {cache_directory()} ({reason}); unpacking to a temporary directory instead. "
        "Set EXPORTKIT_CACHE to a private, writable directory.",
        RuntimeWarning,
        stacklevel=2,
    )
    try:
        return _unpack_in(_fallback_directory(), reader, contents, again)
    except OSError as error:
        size = sum(record.size for record in contents.records.values())
        raise CacheError(
            f"cannot unpack {reader.path.name} ({size / 1e6:.1f} MB): not to the cache {cache_directory()} ({reason}), "
            f"and not to the temporary directory {tempfile.gettempdir()} ({_reason(error)})",
            hint="Make room, or set EXPORTKIT_CACHE to a private, writable directory that has some.",
        ) from error


def _reason(error: OSError) -> str:
    return f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}"


def _unpack_in(root: Path, reader: PackageReader, contents: Contents, again: bool) -> Entry:
    for left in reversed(range(_RACES)):
        try:
            folder = private_folder(root, contents.kind, contents.digest)
            with contextlib.ExitStack() as undo:
                fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
                undo.callback(os.close, fd)
                lock(fd, fcntl.LOCK_SH)
                _fill(folder, reader, contents, again)
                if os.path.samestat(os.fstat(fd), folder.lstat()):
                    undo.pop_all()
                    return Entry(folder, fd)
        except FileNotFoundError:  # deleted under our hands
            if not left:
                raise
    raise FileNotFoundError(0, "it is deleted again and again", str(folder))


def _fill(folder: Path, reader: PackageReader, contents: Contents, again: bool) -> None:
    """Brings the files into the folder, unless they are there and known to be right."""
    digests = {name: record.sha256 for name, record in contents.records.items()}
    if again or not is_verified(folder, read_record(folder / RECORD, EntryRecord), digests):
        with _taking_turns(folder):
            # Another process may have done it meanwhile.
            if again or not is_verified(folder, read_record(folder / RECORD, EntryRecord), digests):
                _verify_or_extract(folder, reader, contents)
    touch(folder)


def _verify_or_extract(folder: Path, reader: PackageReader, contents: Contents) -> None:
    files = {}
    for name, record in contents.records.items():
        path = folder / name
        state = state_if_content(path, record.sha256)
        if state is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            reader.extract(record.name, path, mode=0o600)
            state = FileState.of(path.lstat())
        files[name] = VerifiedFile(record.sha256, state)
    states = [file.state for file in files.values()]
    write_record(folder / RECORD, lambda now: EntryRecord(now, files), younger_than=states)


@contextlib.contextmanager
def _taking_turns(folder: Path) -> Iterator[None]:
    """Only one process at a time, where files can be locked: the others would write the same once more."""
    try:
        fd = os.open(folder / _WRITERS_LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        raise
    except OSError:  # read-only, and yet all may be there
        yield
        return
    try:
        lock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def lock(fd: int, operation: int) -> None:
    """Locks a file, unless the file system has no locks, or whoever has the lock keeps it for too long."""
    deadline = time.monotonic() + _LOCK_PATIENCE
    while True:
        try:
            fcntl.flock(fd, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(0.005)
                continue
        except OSError:
            pass
        return


_fallback: tuple[int, Path] | None = None  # the process that made it, and the directory
_fallback_lock = threading.Lock()


def _fallback_directory() -> Path:
    """A directory of this process, removed when it ends."""
    global _fallback
    with _fallback_lock:
        process = os.getpid()
        if _fallback is None or _fallback[0] != process:  # the parent of a fork removes its own
            stack = contextlib.ExitStack()
            folder = stack.enter_context(temporary_folder(None, "exportkit-cache"))
            atexit.register(stack.close)
            _fallback = (process, folder)
        return _fallback[1]
