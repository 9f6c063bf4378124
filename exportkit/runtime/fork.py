"""What forks need: in the child, what another thread of the parent was in the middle of never ends."""

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
    """From now on, `os.fork` waits until no thread is in the middle of our C++ code, and ends OpenMP's idle threads.

    GNU's OpenMP library does not know of forks, and a child would wait in it forever for the threads that its parent
    worked with; so would torch's own operators. Both processes start new ones when they need some.
    """
    with contextlib.suppress(OSError, AttributeError):  # other libraries than GNU's know of forks
        end_threads = ctypes.CDLL("libgomp.so.1").omp_pause_resource_all
        os.register_at_fork(before=lambda: end_threads(_OMP_PAUSE_HARD))
    os.register_at_fork(before=_before, after_in_parent=lambda: _after(0), after_in_child=lambda: _after(1))


def _before() -> None:
    libraries.loading.acquire()  # first, since who holds it may be about to call our C++ code
    core.library().ek_before_fork()


def _after(child: int) -> None:
    core.library().ek_after_fork(child)
    libraries.loading.release()
