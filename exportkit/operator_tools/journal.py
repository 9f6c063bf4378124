"""What a child process is doing, in a file: it is read after the process has ended without a word."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import msgspec


class Step(msgspec.Struct, frozen=True):
    """What the process did.

    Attributes:
        check: The check.
        call: The call, as code; None if it is about the operator as a whole.
    """

    check: str
    call: str | None = None


class Journal:
    """The child's side. The kernel ends the process if a step takes too long, whatever the process is doing.

    Args:
        path: The file.
        timeout: Seconds that a step may take.
    """

    def __init__(self, path: Path, timeout: float) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self._timeout = timeout

    def write(self, step: Step) -> None:
        """Says what comes next."""
        data = msgspec.json.encode(step)
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, data, 0)
        # The default action of SIGALRM ends the process. A handler in Python would wait for the kernel to return.
        signal.setitimer(signal.ITIMER_REAL, self._timeout)

    def rest(self) -> None:
        """Nothing that could take too long comes next."""
        signal.setitimer(signal.ITIMER_REAL, 0)


def read_step(path: Path) -> Step | None:
    """Reads the last step, or returns None if there is none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Step)
    except (OSError, msgspec.DecodeError):
        return None
