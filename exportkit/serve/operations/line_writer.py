"""Writes lines of a log without holding up the event loop."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable

_MAX_WAITING = 10_000
_GATHER_SECONDS = 0.02  # A thread that woke up for each line would take the interpreter's lock from the models'.


class LineWriter:
    """A thread that writes lines to a file descriptor.

    A reader that is too slow, such as a full pipe, loses lines: requests do not wait for a log.
    """

    def __init__(self, descriptor: int, lost: Callable[[int], None]) -> None:
        """Starts the thread. `lost` gets the number of lines that were given up; any thread may call it."""
        self._descriptor = descriptor
        self._lost = lost
        self._waiting: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="exportkit-log", daemon=True)
        self._thread.start()

    def write(self, line: bytes) -> None:
        """Writes a line soon. It has no line break."""
        if self._waiting.qsize() < _MAX_WAITING:
            self._waiting.put(line + b"\n")
        else:
            self._lost(1)

    def close(self, seconds: float) -> None:
        """Writes what waits, within this time."""
        self._closing.set()
        self._waiting.put(None)
        self._thread.join(seconds)

    def _run(self) -> None:
        ended = False
        while not ended:
            waiting = [self._waiting.get()]
            self._closing.wait(_GATHER_SECONDS)  # so that many lines need one system call
            while not self._waiting.empty():
                waiting.append(self._waiting.get())
            ended = None in waiting
            lines = [line for line in waiting if line is not None]
            rest = memoryview(b"".join(lines))
            try:
                while rest:
                    rest = rest[os.write(self._descriptor, rest) :]
            except OSError:  # nobody reads any more, or the disk is full
                self._lost(len(lines))
