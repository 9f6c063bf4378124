"""What a child process is doing, in a file: it is read after the process has ended without a word."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec


class Step(msgspec.Struct, frozen=True):
    """What the process did.

    Attributes:
        check: The check.
        call: The call that was made, as code; None if there was none.
        given: The call that the check was given. It may make others of it, such as one with other strides.
    """

    check: str
    call: str | None = None
    given: str | None = None


_OTHERWISE = 900.0  # seconds that a process may take between two calls: it may compile them


class Journal:
    """The child's side. The kernel ends the process if a call takes too long, whatever the process is doing.

    Args:
        path: The file.
        timeout: Seconds that a call may take.
    """

    def __init__(self, path: Path, timeout: float) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self._timeout = timeout

    def write(self, step: Step) -> None:
        """Says what comes next, which may take longer than a call."""
        data = msgspec.json.encode(step)
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, data, 0)
        self._limit(max(self._timeout, _OTHERWISE))

    @contextlib.contextmanager
    def call(self, step: Step) -> Iterator[None]:
        """Says which call comes next, and gives it its time."""
        self.write(step)
        self._limit(self._timeout)
        try:
            yield
        finally:
            self._limit(max(self._timeout, _OTHERWISE))

    def rest(self) -> None:
        """Nothing that could take too long comes next."""
        self._limit(0)

    @staticmethod
    def _limit(seconds: float) -> None:
        # The default action of SIGALRM ends the process. A handler in Python would wait for the kernel to return.
        signal.setitimer(signal.ITIMER_REAL, seconds)


def read_step(path: Path) -> Step | None:
    """Reads the last step, or returns None if there is none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Step)
    except (OSError, msgspec.DecodeError):
        return None
