"""Runs work in a fork of this process, whose memory it has, so that it may end the fork and change nothing here."""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Callable

from exportkit.child.process import describe_end
from exportkit.child.process_end import end_with


def in_fork(work: Callable[[], bytes], *, seconds: int = 0) -> bytes | str:
    """Returns what work returned in a fork, or how the fork ended, such as "was killed by SIGSEGV (signal 11)".

    Work must not raise, and must use one thread of OpenMP alone: the others are this process's. The fork is ended after
    so many seconds, if these are not 0.
    """
    parent = os.getpid()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(reading)
            end_with(parent)
            faulthandler.disable()  # its file is for what ends this process
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(seconds)
            with open(writing, "wb") as out:
                out.write(work())
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    with open(reading, "rb") as told:
        body = told.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return describe_end(status) if status else body
