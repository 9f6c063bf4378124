"""What the cache holds, and how it is kept small, beside running models."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from exportkit.package.atomic import temporaries
from exportkit.runtime.cache import cache_directory
from exportkit.runtime.cache.entries import LIBRARIES, RECORD, TARGETS, WRITERS_LOCK
from exportkit.runtime.cache.trust import PACKAGES

TEMPORARY_PREFIX = "exportkit-"  # of every directory that exportkit makes in the temporary directory
Kind = Literal["library", "target", "package", "leftover"]


@dataclass(frozen=True)
class Item:
    """Something that is kept, or left over.

    Attributes:
        kind: An unpacked library or target; the record of a package; what a killed process left.
        path: Its folder or file.
        size: In bytes.
        used: When it was last used, in seconds since 1970.
        in_use: Whether a process uses it now, or writes it.
    """

    kind: Kind
    path: Path
    size: int
    used: float
    in_use: bool


@dataclass(frozen=True)
class Pruned:
    """What was removed, and what stayed."""

    removed: tuple[Item, ...]
    kept: tuple[Item, ...]


def cache_items() -> tuple[Item, ...]:
    """What is in the cache, and what was left in the temporary directory; first what was used least recently."""
    root = Path(os.path.realpath(cache_directory()))
    items = [
        *_entries(root / LIBRARIES, "library"),
        *_entries(root / TARGETS, "target"),
        *_packages(root / PACKAGES),
        *_temporary(Path(tempfile.gettempdir())),
    ]
    return tuple(sorted(items, key=lambda item: item.used))


def prune(*, max_bytes: int | None = None, unused_for: float | None = None, everything: bool = False) -> Pruned:
    """Removes what killed processes left, and what the limits leave no room for; never what is in use.

    Args:
        max_bytes: What was used least recently goes until no more is left. Records of packages stay: they take no room,
            and without one a large package is hashed again.
        unused_for: What was not used for so many seconds goes.
        everything: All goes.
    """
    items = cache_items()
    total = sum(item.size for item in items)
    now = time.time()
    removed, kept = [], []
    for item in items:
        wanted = (
            everything
            or item.kind == "leftover"
            or (unused_for is not None and now - item.used > unused_for)
            or (max_bytes is not None and total > max_bytes and item.kind != "package")
        )
        if wanted and not item.in_use and _remove(item.path):
            total -= item.size
            removed.append(item)
        else:
            kept.append(item)
    return Pruned(tuple(removed), tuple(kept))


def _entries(parent: Path, kind: Kind) -> Iterator[Item]:
    for folder in _listed(parent):
        if not folder.is_dir() or folder.is_symlink():
            continue
        in_use = _in_use(folder)
        unfinished = temporaries(folder)
        if in_use or (folder / RECORD).exists():
            yield from (_item("leftover", path, in_use=_in_use(path)) for path in unfinished)
            yield _item(kind, folder, in_use=in_use)
        else:  # without a record: of a loader that could not write it, or of one that was killed
            nothing = not any(path.is_file() and path.name != WRITERS_LOCK for path in folder.rglob("*"))
            yield _item("leftover" if unfinished or nothing else kind, folder, in_use=False)


def _packages(parent: Path) -> Iterator[Item]:
    unfinished = set(temporaries(parent))
    for path in _listed(parent):
        yield _item("leftover" if path in unfinished else "package", path, in_use=_in_use(path))


def _temporary(parent: Path) -> Iterator[Item]:
    """Directories of commands and loads that take the cache's place or hold what is compiled; most of them at work."""
    for path in temporaries(parent):
        if path.name.startswith(TEMPORARY_PREFIX) and path.lstat().st_uid == os.geteuid():
            yield _item("leftover", path, in_use=_in_use(path))


def _item(kind: Kind, path: Path, *, in_use: bool) -> Item:
    files = [path, *path.rglob("*")] if path.is_dir() else [path]
    size = 0
    for file in files:
        try:
            size += file.lstat().st_size if not file.is_dir() else 0
        except OSError:
            continue  # gone meanwhile
    try:
        used = path.lstat().st_mtime
    except OSError:
        used = 0.0
    return Item(kind, path, size, used, in_use)


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _in_use(folder: Path) -> bool:
    fd = _locked(folder)
    if fd is None:
        return True
    os.close(fd)
    return False


def _remove(path: Path) -> bool:
    """Whether it could be removed: an entry only as long as nobody else has it locked."""
    fd = _locked(path)
    if fd is None:
        return False
    try:
        if path.is_dir():
            # Not for long half an entry that counts as verified, should this process be killed now.
            (path / RECORD).unlink(missing_ok=True)
            shutil.rmtree(path)
        else:
            path.unlink()
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def _locked(path: Path) -> int | None:
    """The open file with an exclusive lock on it; None if another process has one, or it cannot be opened."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except OSError:  # a file system without locks: then mapped files are all that keeps a model running
        pass
    return fd
