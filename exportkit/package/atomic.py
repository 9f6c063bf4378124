"""Files that are there whole or not at all, and what goes away with the process that made it, however that ends.

What is unfinished has a temporary name and is locked by its maker. The system drops the lock of a process that was
killed, so what has such a name and no lock is left over, and the next one who writes there removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from exportkit.errors import UsageError

_TEMPORARY = re.compile(r"(.+)\.[0-9a-f]{16}\.tmp")  # a name that is made here, and its prefix


@contextlib.contextmanager
def written_whole(path: Path, *, mode: int = 0o666, durable: bool = True) -> Iterator[BinaryIO]:
    """A file to write, which takes its name when the block ends, and goes away if the block fails.

    Args:
        path: Where it goes; its folder must exist. A file that is there stays as it was until the end.
        mode: Its permissions, before the process's umask.
        durable: Whether it has reached the disk before it takes its name. Where it is checked again each time it is
            read, waiting for the disk buys nothing.

    Raises:
        OSError: The folder is missing or not writable, or the disk is full.
    """
    prefix = f".{path.name[:200]}"
    remove_leftovers(path.parent, prefix)
    temporary, fd = _create(path.parent, prefix, mode)
    try:
        with open(fd, "wb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
            os.replace(temporary, path)
    except BaseException:  # Ctrl-C too
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        raise


@contextlib.contextmanager
def temporary_folder(parent: Path | None, prefix: str) -> Iterator[Path]:
    """A private folder, which goes away when the block ends; those of this prefix whose makers were killed, before it.

    Args:
        parent: Where it is made; the system's temporary directory if None.
        prefix: Of its name.

    Raises:
        OSError: It cannot be made.
    """
    parent = parent or Path(tempfile.gettempdir())
    remove_leftovers(parent, prefix)
    maker = os.getpid()
    while True:
        folder = _temporary_name(parent, prefix)
        folder.mkdir(mode=0o700)
        try:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:  # taken for a leftover before it was locked
            continue
        _lock(fd)
        if os.fstat(fd).st_nlink:
            break
        os.close(fd)
    try:
        yield folder
    finally:
        if os.getpid() == maker:  # not a fork of it
            shutil.rmtree(folder, ignore_errors=True)
            os.close(fd)


def remove_leftovers(folder: Path, prefix: str | None = None) -> list[Path]:
    """Removes what killed processes left unfinished in a folder.

    Args:
        folder: Need not be there.
        prefix: Of its names, as those that were killed gave it; any if None.

    Returns:
        What was removed.
    """
    return [path for path in temporaries(folder, prefix) if _remove_unlocked(path)]


def temporaries(folder: Path, prefix: str | None = None) -> list[Path]:
    """What is unfinished in a folder, or left over, of this prefix or any."""
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    matches = map(_TEMPORARY.fullmatch, names)
    return [folder / match[0] for match in matches if match and prefix in (None, match[1])]


def check_writable(path: Path) -> None:
    """Looks whether a file could be written, before the work that makes its content.

    Raises:
        UsageError: Its folder is missing, or may not be written to.
    """
    if not path.parent.is_dir():
        raise UsageError(f"cannot write {path}: there is no folder {path.parent}", hint="Create it first.")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise UsageError(f"cannot write {path}: you may not write into the folder {path.parent}")


def _temporary_name(folder: Path, prefix: str) -> Path:
    return folder / f"{prefix}.{os.urandom(8).hex()}.tmp"


def _create(folder: Path, prefix: str, mode: int) -> tuple[Path, int]:
    """A new file that is locked."""
    while True:
        # In the same folder, or the rename would be a copy. os.open, not tempfile: umask decides who may read it.
        path = _temporary_name(folder, prefix)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        _lock(fd)
        if os.fstat(fd).st_nlink:
            return path, fd
        os.close(fd)  # taken for a leftover before it was locked


def _lock(fd: int) -> None:
    with contextlib.suppress(OSError):  # a file system without locks: its leftovers stay
        fcntl.flock(fd, fcntl.LOCK_EX)


def _remove_unlocked(path: Path) -> bool:
    """Whether it was left over, and could be removed."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # gone, or not ours
        return False
    try:
        if os.fstat(fd).st_uid != os.geteuid():
            return False
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    except OSError:  # locked, by one who is at work
        return False
    finally:
        os.close(fd)
    return True
