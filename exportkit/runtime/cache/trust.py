"""Which files count as verified without being read again: the rules of `exportkit.runtime.cache`."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec
from typing_extensions import Self

from exportkit.libraries import stream_sha256
from exportkit.package.archive import PackageReader
from exportkit.package.atomic import written_whole
from exportkit.runtime.cache import cache_directory

PACKAGES = "packages"  # the folder of their records
_MARGIN_NS = 2_000_000_000  # the coarsest times that a file system keeps (FAT's)
_MAX_RECORD_BYTES = 16 << 20


class FileState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a file was when its content was hashed."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Self:
        """From what stat says."""
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)

    @property
    def changed_ns(self) -> int:
        """When it was last changed, by the later of both times."""
        return max(self.mtime_ns, self.ctime_ns)


class VerifiedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file that had this content."""

    sha256: str
    state: FileState


class EntryRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was verified in a folder of unpacked files."""

    checked_ns: int
    files: dict[str, VerifiedFile]


class PackageRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A package of which every digest held."""

    checked_ns: int
    manifest_sha256: str
    state: FileState


Record = TypeVar("Record", EntryRecord, PackageRecord)
# Made at import: exportkit.package.manifest says why.
_DECODERS: dict[type, msgspec.json.Decoder[Any]] = {
    kind: msgspec.json.Decoder(kind) for kind in (EntryRecord, PackageRecord)
}


def verify_package(reader: PackageReader, *, again: bool) -> None:
    """Checks every record's digest, unless that was done and the file is what it was then.

    Args:
        reader: The open package.
        again: Whether to check even so.

    Raises:
        DigestMismatchError: A record's content is not what the manifest says.
    """
    status = os.fstat(reader.fileno())
    state, path = FileState.of(status), _record_path(status)
    if path and not again and _is_known(reader, status, path):
        touch(path)
        return
    started = time.time_ns()
    reader.verify()
    unchanged = state == FileState.of(os.fstat(reader.fileno()))
    if path and unchanged and state.changed_ns + _MARGIN_NS <= started and others_may_change(status) is None:
        record = PackageRecord(started, reader.manifest_sha256, state)
        write_record(path, lambda _: record)


def _record_path(status: os.stat_result) -> Path | None:
    """Where the record of a package is; None without a usable cache: then nothing is known, and nothing can be kept."""
    try:
        return private_folder(cache_directory(), PACKAGES) / f"{status.st_dev}-{status.st_ino}.json"
    except OSError:
        return None


def _is_known(reader: PackageReader, status: os.stat_result, path: Path) -> bool:
    record = read_record(path, PackageRecord)
    return (
        record is not None
        and others_may_change(status) is None
        and record.state == FileState.of(status)
        and record.manifest_sha256 == reader.manifest_sha256
    )


def is_verified(folder: Path, record: EntryRecord | None, digests: dict[str, str]) -> bool:
    """Whether these files are in a folder, with these digests, and need not be read to know it."""
    if record is None:
        return False
    for name, sha256 in digests.items():
        verified = record.files.get(name)
        if verified is None or verified.sha256 != sha256 or verified.state.changed_ns >= record.checked_ns:
            return False
        try:
            status = (folder / name).lstat()
        except OSError:
            return False
        if others_may_change(status) is not None or FileState.of(status) != verified.state:
            return False
    return True


def state_if_content(path: Path, sha256: str) -> FileState | None:
    """The state of a file of this content that only we can change; None if there is none. A link is no such file."""
    file = _open_ours(path)
    if file is None:
        return None
    with file:
        state = FileState.of(os.fstat(file.fileno()))
        return state if stream_sha256(file) == sha256 else None


def others_may_change(status: os.stat_result) -> str | None:
    """Why another user could change a file or what is in a directory; None if none can."""
    if stat.S_ISLNK(status.st_mode):
        return "it is a link"
    if status.st_uid not in (0, os.geteuid()):  # root's will do: a cache that was made with a container's image
        return "it belongs to another user"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "other users may write to it"
    return None


def private_folder(root: Path, *parts: str) -> Path:
    """A folder under the cache's, made where it is missing, in which no other user could exchange a file for theirs.

    Raises:
        OSError: It cannot be made, or is not ours alone.
    """
    # Links on the way are followed once, here: who may exchange one cannot lead the dynamic linker elsewhere later.
    root = Path(os.path.realpath(root))
    root.parent.mkdir(parents=True, exist_ok=True)
    folder = root
    for part in ("", *parts):
        folder = folder / part
        folder.mkdir(mode=0o700, exist_ok=True)
        if reason := others_may_change(folder.lstat()):
            raise PermissionError(0, reason, str(folder))
    for directory in root.parents:
        mode = directory.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:  # /tmp's bit: only its owner renames what is in it
            raise PermissionError(0, "other users may rename what is in it", str(directory))
    return folder


def read_record(path: Path, kind: type[Record]) -> Record | None:
    """A record that only we can have written, and not later than now; None for anything else."""
    file = _open_ours(path)
    if file is None:
        return None
    with file:
        try:
            record = _DECODERS[kind].decode(file.read(_MAX_RECORD_BYTES))
        except (OSError, ValueError):  # msgspec's errors are ValueErrors
            return None
    return record if record.checked_ns <= time.time_ns() else None


def write_record(path: Path, make: Callable[[int], Record], *, younger_than: Iterable[FileState] = ()) -> None:
    """Writes a record, if that can be done; without one, files are hashed again.

    Args:
        path: Where it goes.
        make: Of the time of the file system's clock.
        younger_than: That clock is waited for until it has gone past these files' last change, so that the next change
            will show in their times.
    """
    changed_ns = max((state.changed_ns for state in younger_than), default=0)
    with contextlib.suppress(OSError), written_whole(path, mode=0o600, durable=False) as file:
        file.write(msgspec.json.encode(make(_time_after(changed_ns, file.fileno()))))


def touch(path: Path) -> None:
    """Notes that something was used, for `prune` to know what was not."""
    with contextlib.suppress(OSError):
        os.utime(path)


def _open_ours(path: Path) -> BinaryIO | None:
    """A file that only we can change; None for anything else, and for what cannot be read."""
    try:
        # Non-blocking, or a FIFO would wait for a writer.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or others_may_change(status):
        os.close(fd)
        return None
    return open(fd, "rb")


def _time_after(changed_ns: int, fd: int) -> int:
    """The time by the clock that gives files their times. It ticks every few milliseconds."""
    for _ in range(20):
        os.utime(fd)
        now = os.fstat(fd).st_mtime_ns
        if not now <= changed_ns < now + 10**9:  # past it; or nowhere near, by a clock that was set back
            break
        time.sleep(0.002)
    return now
