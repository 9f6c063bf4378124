"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from exportkit.errors import UsageError


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
    # In the same folder, or the rename would be a copy. os.open rather than tempfile: umask decides who may read it.
    temporary = path.with_name(f".{path.name[:200]}.{os.urandom(8).hex()}.tmp")
    fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
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


def check_writable(path: Path) -> None:
    """Looks whether a file could be written, before the work that makes its content.

    Raises:
        UsageError: Its folder is missing, or may not be written to.
    """
    if not path.parent.is_dir():
        raise UsageError(f"cannot write {path}: there is no folder {path.parent}", hint="Create it first.")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise UsageError(f"cannot write {path}: you may not write into the folder {path.parent}")
