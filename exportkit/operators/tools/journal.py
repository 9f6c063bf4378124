"""What a child process is doing, in a file: it is read after the process has ended without a word."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec


class Step(msgspec.Struct, frozen=True):
    """What the process did: a check, and the call that was made for it, as code.

    The check was given a call, and may have made another of it, such as one with other strides. `fault` is what the GPU
    said when the call ended its context, and so this process.
    """

    check: str
    call: str | None = None
    given: str | None = None
    fault: str | None = None


LOST = 86  # the exit code of a process whose GPU's context a call has ended
_OTHERWISE = 900.0  # seconds that a process may take between two calls: it may compile them


class Journal:
    """The child's side. A call that takes longer than the timeout ends the process, whatever it is doing.

    `error` waits for what was launched on a GPU, and returns what went wrong.
    """

    def __init__(self, path: Path, timeout: float, error: Callable[[], str | None] = lambda: None) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self._timeout = timeout
        self._error = error
        self.unseen: dict[str, str] = {}  # what failed launches said that no operator has looked at, by call

    def write(self, step: Step) -> None:
        """Says what comes next, which may take longer than a call."""
        data = msgspec.json.encode(step)
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, data, 0)
        self._limit(max(self._timeout, _OTHERWISE))

    @contextlib.contextmanager
    def call(self, step: Step) -> Iterator[None]:
        """Says which call comes next, gives it its time, and waits for what it launched on a GPU.

        A call that ends the GPU's context ends the process: whoever came next would be blamed. A launch that failed
        while the operator did not look is a RuntimeError.
        """
        self.write(step)
        self._limit(self._timeout)
        try:
            yield
            if said := self._error():
                self.unseen.setdefault(str(step.call), said)
                raise RuntimeError(f"the launch of a kernel failed: {said}")
        finally:
            if (fault := self._error()) and self._error():  # it says so again: the context is lost
                self.write(Step(step.check, step.call, step.given, fault))
                os._exit(LOST)
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
