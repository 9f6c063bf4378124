"""Keeps the memory of bodies in the process, where the C library would give it back after every request."""

from __future__ import annotations

import ctypes

# Numbers of glibc's mallopt(3).
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3

_MMAP_BYTES = 32 << 20  # the most that glibc allows
_KEPT_BYTES = 256 << 20


def keep_freed_memory() -> bool:
    """Lets glibc keep up to 256 MiB of freed memory at the end of its heap. Returns whether it does.

    By default it returns what a request used to the system, and the system gives the next request new pages, each of
    which costs a fault: more than a body's copies. Memory that is asked for in pieces above 32 MiB is always returned.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _MMAP_BYTES)) and bool(mallopt(_TRIM_THRESHOLD, _KEPT_BYTES))
