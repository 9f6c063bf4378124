"""Where operator libraries are unpacked to: a directory of the user's own, shared by processes, named by content.

A library is unpacked once and found there by every later load. Its digest is checked again each time, before the
dynamic linker runs any of its code. Nothing else is kept there, and all of it may be deleted at any time.
"""

from __future__ import annotations

import os
import stat
import tempfile
import threading
import warnings
from pathlib import Path

from exportkit.libraries import stream_sha256
from exportkit.package.archive import PackageReader
from exportkit.package.manifest import Library

_fallback: tempfile.TemporaryDirectory[str] | None = None  # removed when the process ends
_fallback_lock = threading.Lock()


def cache_directory() -> Path:
    """$EXPORTKIT_CACHE, or exportkit under $XDG_CACHE_HOME or ~/.cache. It need not exist yet."""
    if own := os.environ.get("EXPORTKIT_CACHE"):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification: a relative path in it is to be ignored. No home is known to a user without a passwd entry.
    return (Path(base) if os.path.isabs(base) else Path(os.path.expanduser("~/.cache"))) / "exportkit"


def unpacked(reader: PackageReader, library: Library) -> Path:
    """The file of a package's library, its content just checked.

    Where the cache cannot be used, a warning says why and a temporary directory takes its place.

    Raises:
        PackageError: The record does not hold.
    """
    try:
        return _unpacked_in(cache_directory(), reader, library)
    except OSError as error:
        reason = f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}"
    warnings.warn(
        f"exportkit cannot use its cache {cache_directory()} ({reason}); unpacking to a temporary directory instead. "
        "Set EXPORTKIT_CACHE to a private, writable directory.",
        RuntimeWarning,
        stacklevel=3,
    )
    return _unpacked_in(_fallback_directory(), reader, library)


def _unpacked_in(root: Path, reader: PackageReader, library: Library) -> Path:
    # Links on the way are followed once, here: who may exchange one cannot lead the dynamic linker elsewhere later.
    root = Path(os.path.realpath(root))
    folder = root / "libraries" / library.sha256
    _make_private(root, folder)
    path = folder / library.record.rpartition("/")[2]
    if not _holds(path, library.sha256):
        reader.extract(library.record, path, mode=0o600)
    return path


def _holds(path: Path, sha256: str) -> bool:
    """Whether there is a file of this content that only we can change; a link is no such file."""
    try:
        # Non-blocking, or a FIFO would wait for a writer.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # none, or one that cannot be read: replaced, if that can be done
        return False
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        return stat.S_ISREG(status.st_mode) and _not_ours_alone(status) is None and stream_sha256(file) == sha256


def _make_private(root: Path, folder: Path) -> None:
    """Creates the directories, and refuses those in which another user could exchange a library for one of theirs.

    Raises:
        OSError: They cannot be created, or are not ours alone.
    """
    root.parent.mkdir(parents=True, exist_ok=True)
    for directory in (root, folder.parent, folder):
        directory.mkdir(mode=0o700, exist_ok=True)
        if reason := _not_ours_alone(directory.lstat()):
            raise PermissionError(0, reason, str(directory))
    for directory in root.parents:
        mode = directory.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:  # /tmp's bit: only its owner renames what is in it
            raise PermissionError(0, "other users may rename what is in it", str(directory))


def _not_ours_alone(status: os.stat_result) -> str | None:
    """Why others could change a file or what is in a directory; None if they cannot."""
    if stat.S_ISLNK(status.st_mode):
        return "it is a link"
    if status.st_uid not in (0, os.geteuid()):  # root's will do: a cache that was made with a container's image
        return "it belongs to another user"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "other users may write to it"
    return None


def _fallback_directory() -> Path:
    global _fallback
    with _fallback_lock:
        if _fallback is None:
            _fallback = tempfile.TemporaryDirectory(prefix="exportkit-")
        return Path(_fallback.name)
