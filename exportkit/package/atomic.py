"""Writes files atomically and makes temporary folders that do not outlive their process for long.

An unfinished file has a temporary name and a lock. The system releases the lock of a killed process, so a file with
such a name but no lock is a leftover. The next writer in the folder removes it.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from exportkit.errors import UsageError
from exportkit.package import core
from exportkit.progress import bytes_text


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file that gets its name only after its whole content reached the disk.

    Args:
        path: The file. Its folder must exist. An existing file stays unchanged until it is replaced.
        content: The file's content.

    Raises:
        OSError: The folder is missing or not writable, or the disk is full.
    """
    core.call("ek_write_file", core.encoded(path), content, len(content))


@contextlib.contextmanager
def temporary_folder(parent: Path | None, prefix: str) -> Iterator[Path]:
    """Makes a private folder and removes it when the block ends.

    It first removes leftover folders of killed processes with the same prefix. A fork of the process does not remove
    the folder.

    Args:
        parent: The folder to make it in. Default: the system's temporary directory.
        prefix: The start of the folder's name.

    Raises:
        OSError: The folder cannot be made.
    """
    folder = core.handle("ek_folder_new", core.encoded(parent or tempfile.gettempdir()), core.encoded(prefix))
    try:
        yield Path(os.fsdecode(core.library().ek_folder_path(folder)))
    finally:
        core.library().ek_folder_close(folder)


def check_writable(path: Path, size: int = 0, read: Iterable[Path | str | None] = ()) -> None:
    """Checks that a file can be written, before the work on its content.

    Args:
        path: The file.
        size: The bytes that it will have at least.
        read: Files that are read for it, which it must not replace; names of other things are no matter.

    Raises:
        UsageError: The folder does not exist, is not writable, or is on a disk that has no room; or the file is read.
    """
    if path.exists() and any(given and os.path.exists(given) and path.samefile(given) for given in read):
        raise UsageError(f"cannot write {path}: it would replace what is read", hint="Give another name.")
    if not path.parent.is_dir():
        raise UsageError(
            f"cannot write {path}: there is no folder {path.parent}",
            hint=f"Make it: mkdir -p {shlex.quote(str(path.parent))}",
        )
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise UsageError(f"cannot write {path}: the folder {path.parent} is not writable")
    free = shutil.disk_usage(path.parent).free
    if size > free:
        raise UsageError(
            f"cannot write {path}: it will have {bytes_text(size)} or more, and {bytes_text(free)} are free",
            hint="Make room, or write to another disk.",
        )
