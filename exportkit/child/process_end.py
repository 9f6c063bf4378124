"""How processes end: with their parent, or at once although they have torch."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import threading

_PR_SET_PDEATHSIG = 1


def end_with(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Lets the kernel send this process a signal when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it ended before the kernel was told
        os._exit(1)


def end_at_once(code: int) -> int:
    """Ends this process with a code, without taking apart what torch and its compiler have made: that takes a second.

    What was registered for the end is done first. It returns the code, and Python ends the process, if torch is not
    loaded, if another thread must end first, or if nobody reads what was printed.
    """
    others = [each for each in threading.enumerate() if each is not threading.main_thread()]
    if "torch" not in sys.modules or not all(each.daemon for each in others):
        return code
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        return code
    os._exit(code)
