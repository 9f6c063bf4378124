"""What a process that ran a model needs in order to fork."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os

_OMP_PAUSE_HARD = 2  # omp_pause_hard of OpenMP 5.0


@functools.lru_cache(maxsize=1)
def survive_forks() -> None:
    """From now on, ends OpenMP's idle threads before `os.fork`: both processes start new ones when they need some.

    A fork has one thread, the one that forked. GNU's OpenMP library does not know, and would wait in it forever for the
    threads that this one worked with before; so would torch's own operators. It takes about 30 us a fork.
    """
    with contextlib.suppress(OSError, AttributeError):  # another library than GNU's: they know of forks
        end_threads = ctypes.CDLL("libgomp.so.1").omp_pause_resource_all
        os.register_at_fork(before=lambda: end_threads(_OMP_PAUSE_HARD))
