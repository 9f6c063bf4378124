"""Shared memory that no process can shrink under another: that would kill whoever reads it."""

from __future__ import annotations

import fcntl
import mmap
import os

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def new_memory(name: str, size: int) -> int:
    """Opens an anonymous file, whose size stays as it is.

    The memory is taken now, so that missing memory is an error here instead of a SIGBUS in a later write.

    Args:
        name: What /proc shows.
        size: In bytes.

    Returns:
        The descriptor, which the caller closes.

    Raises:
        OSError: A limit of this process forbids it, or there is no memory.
    """
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(descriptor, 0, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        return descriptor
    except BaseException:
        os.close(descriptor)
        raise


def map_memory(descriptor: int) -> mmap.mmap:
    """Maps such a file, which may then be closed.

    Raises:
        ValueError: Another process could still shrink it.
        OSError: A limit of this process forbids it.
    """
    if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise ValueError("the shared memory could be shrunk")
    return mmap.mmap(descriptor, os.fstat(descriptor).st_size)
