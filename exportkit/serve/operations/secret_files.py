"""Reads files that only the server and its administrator may read."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from exportkit.errors import UsageError

_MAX_BYTES = 1 << 20


def read_secret(path: Path, kind: str) -> bytes:
    """Reads a file that other users cannot read.

    Args:
        path: The file.
        kind: What it is, for messages, such as "the file of API keys".

    Raises:
        UsageError: It cannot be read, is no regular file, is larger than 1 MiB, or other users may read or change it.
    """
    try:
        # Without O_NONBLOCK, opening a pipe would wait for its writer.
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            content = file.read(_MAX_BYTES + 1) if stat.S_ISREG(status.st_mode) else None
    except OSError as error:
        raise UsageError(f"{kind} {path} cannot be read: {error.strerror}") from error
    if content is None:
        raise UsageError(f"{kind} {path} is not a regular file")
    if status.st_mode & stat.S_IRWXO:
        raise UsageError(
            f"{kind} {path} is open to every user of this machine (mode {stat.S_IMODE(status.st_mode):04o})",
            hint=f"Run `chmod o-rwx {path}`. In Kubernetes, give the secret's volume `defaultMode: 0440`.",
        )
    if len(content) > _MAX_BYTES:
        raise UsageError(f"{kind} {path} is larger than 1 MiB")
    return content
