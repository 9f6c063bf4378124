"""A time limit that every request sets several times, and that hardly ever passes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Deadline:
    """Calls a function at a time that may be set again.

    To begin a timer and cancel it takes 2 to 5 us. So one that wakes too early may, and begins the next.
    """

    def __init__(self) -> None:
        """Nothing is to be called."""
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._expired: Callable[[], None] | None = None
        self._due = self._wakes = 0.0

    def set(self, seconds: float, expired: Callable[[], None]) -> None:
        """Calls `expired` in so many seconds, and not what was set before."""
        self._due, self._expired = self._loop.time() + seconds, expired
        if self._timer is None or self._wakes > self._due:
            self._wake_in(seconds)

    def clear(self) -> None:
        """Calls nothing."""
        self._expired = None

    def close(self) -> None:
        """Calls nothing, and lets go of the loop."""
        self._expired = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wake_in(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._wakes = self._due
        self._timer = self._loop.call_later(seconds, self._wake)

    def _wake(self) -> None:
        self._timer = None
        expired, left = self._expired, self._due - self._loop.time()
        if expired is not None and left > 0:
            self._wake_in(left)
        elif expired is not None:
            self._expired = None
            expired()
