"""What a model has accepted and not answered yet."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AbstractContextManager

from exportkit.serve.batching.fair_order import beyond_share
from exportkit.serve.batching.tickets import BatchLimits
from exportkit.serve.engine.checked_request import CheckedRequest, RequestForm
from exportkit.serve.engine.statistics import Statistics
from exportkit.serve.statuses import QueueFullError, ServeError, TooLargeError


class AcceptedRequests:
    """What is accepted and not answered yet: bodies that are read, and requests.

    Attributes:
        bytes: The bytes for which they reserved room.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._clients: Counter[str] = Counter()  # the bytes of those that share the room
        self._count = 0
        self._none = asyncio.Event()
        self._none.set()

    def enter(self, size: int) -> None:
        """Counts one more."""
        self.bytes += size
        self._count += 1
        self._none.clear()

    def bytes_of(self, client: str) -> int:
        """Returns the bytes of a client; 0 where the room is not shared."""
        return self._clients[client] if client else 0

    def count_client(self, client: str, more: int) -> None:
        """Counts bytes of a client, or fewer."""
        self._clients[client] += more
        if not self._clients[client]:
            del self._clients[client]

    def leave(self, size: int) -> None:
        """Counts one less."""
        self.bytes -= size
        self._count -= 1
        if not self._count:
            self._none.set()

    def why_no_room(self, size: int, client: str, limits: BatchLimits, rows: int, own_rows: int) -> ServeError | None:
        """Returns why a body may not come; None: it may.

        Args:
            size: Its bytes.
            client: Whose it is, of several who share the room. Empty: there are none.
            limits: The limits of all.
            rows: The rows that wait.
            own_rows: Those of the client.
        """
        held, own = self.bytes, self.bytes_of(client)
        most_bytes, most_rows = limits.max_queued_bytes, limits.max_queued_rows
        if size > most_bytes:
            return TooLargeError(f"the body has {size} bytes, and at most {most_bytes} may wait")
        if held + size > most_bytes:
            why = f"{held} bytes wait, and at most {most_bytes} may: no room for {size} more"
        elif rows >= most_rows:
            why = f"{rows} rows wait, and at most {most_rows} may"
        elif beyond_share(own, size, most_bytes - held) or beyond_share(own_rows, 1, most_rows - rows):
            why = f"{own_rows} rows and {own} bytes of this API key wait, and the rest is for others"
        else:
            return None
        return QueueFullError(why, hint="Try again later.")

    async def none(self) -> None:
        """Waits until everything is answered."""
        while self._count:
            await self._none.wait()


class Admission(AbstractContextManager[None]):
    """One of the accepted. Every request makes two, and a generator's context would take longer."""

    def __init__(self, accepted: AcceptedRequests, size: int, client: str = "") -> None:
        self._accepted = accepted
        self._size = size
        self._client = client

    def __enter__(self) -> None:
        self._accepted.enter(self._size)
        if self._client:
            self._accepted.count_client(self._client, self._size)

    def __exit__(self, *_: object) -> None:
        self._accepted.leave(self._size)
        if self._client:
            self._accepted.count_client(self._client, -self._size)


class WaitingStep:
    """A step that waits for those before it, which counts as what waits for a runner does."""

    def __init__(self, counted: Statistics, request: CheckedRequest | RequestForm) -> None:
        """Waits from now on."""
        self._counted: Statistics | None = counted
        self._rows, self._size = request.rows, request.size
        counted.entered(self._rows, self._size)

    def close(self) -> None:
        """It waits no more."""
        if self._counted is not None:
            self._counted.left(self._rows, self._size)
            self._counted = None
