"""Files that are there whole or not at all, and what goes away with the process that made it, however that ends.

What is unfinished has a temporary name and is locked by its maker. The system drops the lock of a process that was
killed, so what has such a name and no lock is left over, and the next one who writes there removes it.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from exportkit.errors import UsageError
from exportkit.package import core


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file, which takes its name when all of it has reached the disk.

    Args:
        path: Where it goes; its folder must exist. A file that is there stays as it was until the end.
        content: What it is to hold.

    Raises:
        OSError: The folder is missing or not writable, or the disk is full.
    """
    core.call("ek_write_file", core.encoded(path), content, len(content))


@contextlib.contextmanager
def temporary_folder(parent: Path | None, prefix: str) -> Iterator[Path]:
    """A private folder, which goes away when the block ends; those of this prefix whose makers were killed, before it.

    A fork of the process leaves it alone.

    Args:
        parent: Where it is made; the system's temporary directory if None.
        prefix: Of its name.

    Raises:
        OSError: It cannot be made.
    """
    folder = core.handle("ek_folder_new", core.encoded(parent or tempfile.gettempdir()), core.encoded(prefix))
    try:
        yield Path(os.fsdecode(core.library().ek_folder_path(folder)))
    finally:
        core.library().ek_folder_close(folder)


def check_writable(path: Path) -> None:
    """Looks whether a file could be written, before the work that makes its content.

    Raises:
        UsageError: Its folder is missing, or may not be written to.
    """
    if not path.parent.is_dir():
        raise UsageError(f"cannot write {path}: there is no folder {path.parent}", hint="Create it first.")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise UsageError(f"cannot write {path}: you may not write into the folder {path.parent}")
