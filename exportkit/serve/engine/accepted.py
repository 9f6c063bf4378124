"""What a model has accepted and not answered yet."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager

from exportkit.serve.batching.tickets import BatchLimits
from exportkit.serve.engine.checked_request import CheckedRequest
from exportkit.serve.engine.statistics import Statistics
from exportkit.serve.statuses import QueueFullError, ServeError, TooLargeError


class AcceptedRequests:
    """What is accepted and not answered yet: bodies that are read, and requests.

    Attributes:
        bytes: The bytes for which they reserved room.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._count = 0
        self._none = asyncio.Event()
        self._none.set()

    def enter(self, size: int) -> None:
        """Counts one more."""
        self.bytes += size
        self._count += 1
        self._none.clear()

    def leave(self, size: int) -> None:
        """Counts one less."""
        self.bytes -= size
        self._count -= 1
        if not self._count:
            self._none.set()

    def why_no_room(self, size: int, limits: BatchLimits, rows: int) -> ServeError | None:
        """Returns why a body may not come; None: it may.

        Args:
            size: Its bytes.
            limits: The limits.
            rows: The rows that wait.
        """
        held, most_bytes, most_rows = self.bytes, limits.max_queued_bytes, limits.max_queued_rows
        if size > most_bytes:
            return TooLargeError(f"the body has {size} bytes, and at most {most_bytes} may wait")
        if held + size > most_bytes:
            why = f"{held} bytes wait, and at most {most_bytes} may: no room for {size} more"
        elif rows >= most_rows:
            why = f"{rows} rows wait, and at most {most_rows} may"
        else:
            return None
        return QueueFullError(why, hint="Try again later.")

    async def none(self) -> None:
        """Waits until everything is answered."""
        while self._count:
            await self._none.wait()


class Admission(AbstractContextManager[None]):
    """One of the accepted. Every request makes two, and a generator's context would take longer."""

    def __init__(self, accepted: AcceptedRequests, size: int) -> None:
        self._accepted = accepted
        self._size = size

    def __enter__(self) -> None:
        self._accepted.enter(self._size)

    def __exit__(self, *_: object) -> None:
        self._accepted.leave(self._size)


class WaitingStep:
    """A step that waits for those before it, which counts as what waits for a runner does."""

    def __init__(self, counted: Statistics, request: CheckedRequest) -> None:
        """Waits from now on."""
        self._counted: Statistics | None = counted
        self._rows, self._size = request.rows, request.size
        counted.entered(self._rows, self._size)

    def close(self) -> None:
        """It waits no more."""
        if self._counted is not None:
            self._counted.left(self._rows, self._size)
            self._counted = None
