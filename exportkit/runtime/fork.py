"""Makes os.fork safe. A lock held by another thread during the fork would never be released in the child."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os

from exportkit import libraries
from exportkit.package import core

_OMP_PAUSE_HARD = 2  # omp_pause_hard of OpenMP 5.0


@functools.lru_cache(maxsize=1)
def make_forks_safe() -> None:
    """Makes every later `os.fork` wait until no thread runs exportkit's C++ code, and end OpenMP's idle threads.

    GNU's OpenMP library does not support forks: in the child, it and torch's operators would wait forever for the
    parent's threads. Both processes start new threads when they need them.
    """
    with contextlib.suppress(OSError, AttributeError):  # other OpenMP libraries support forks
        end_threads = ctypes.CDLL("libgomp.so.1").omp_pause_resource_all
        os.register_at_fork(before=lambda: end_threads(_OMP_PAUSE_HARD))
    os.register_at_fork(before=_before, after_in_parent=lambda: _after(0), after_in_child=lambda: _after(1))


def _before() -> None:
    libraries.loading.acquire()  # first, because its holder may be about to call exportkit's C++ code
    core.library().ek_before_fork()


def _after(child: int) -> None:
    core.library().ek_after_fork(child)
    libraries.loading.release()
