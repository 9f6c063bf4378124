"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def written_whole(path: Path, *, mode: int = 0o666) -> Iterator[BinaryIO]:
    """A file to write, which takes its name when the block ends, and goes away if the block fails.

    Args:
        path: Where it goes; its folder must exist. A file that is there stays as it was until the end.
        mode: Its permissions, before the process's umask.

    Raises:
        OSError: The folder is missing or not writable, or the disk is full.
    """
    # In the same folder, or the rename would be a copy. os.open rather than tempfile: umask decides who may read it.
    temporary = path.with_name(f".{path.name[:200]}.{secrets.token_hex(8)}.tmp")
    fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with open(fd, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:  # Ctrl-C too
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        raise
