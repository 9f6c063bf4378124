"""Reading files of which no more is known than that they are small: signatures, keys, policies."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from exportkit.package.container import pread

MAX_BYTES = 64 << 10


def read_small(path: Path, *, guarded: bool = False) -> bytes:
    """A file's content, at most 64 KiB of it.

    Args:
        path: Links are followed.
        guarded: Whether nobody but its owner, who is this user or root, may be able to change or replace it.

    Raises:
        FileNotFoundError: There is none.
        OSError: It cannot be read.
        ValueError: It is no plain file, too large, or not guarded; the message completes "the file ...".
    """
    # Non-blocking, or a FIFO would wait for a writer.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("is not a plain file")
        if guarded:
            _check_guarded(path, status)
        content = pread(fd, 0, MAX_BYTES + 1)
    finally:
        os.close(fd)
    if len(content) > MAX_BYTES:
        raise ValueError(f"has more than {MAX_BYTES} bytes")
    return content


def _check_guarded(path: Path, status: os.stat_result) -> None:
    if reason := _not_guarded(status):
        raise ValueError(reason)
    for folder in Path(os.path.realpath(path)).parents:
        if reason := _not_guarded(folder.stat()):
            raise ValueError(f"is in {folder}, which {reason}")


def _not_guarded(status: os.stat_result) -> str | None:
    if status.st_uid not in (0, os.geteuid()):
        return "belongs to another user"
    # /tmp's bit: only the owner of a folder, or of what is in it, renames or removes that.
    sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not sticky:
        return "may be written to by other users"
    return None
