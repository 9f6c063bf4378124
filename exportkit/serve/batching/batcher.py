"""The queue of one model: which requests run together, and when.

A state machine that takes the time as an argument, so that tests can choose it. The caller holds a lock.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from exportkit.serve.batching.limits import BatchLimits

T = TypeVar("T")


@dataclass(eq=False)
class Ticket(Generic[T]):
    """A request that waits or runs.

    Attributes:
        payload: What the caller wants back when the request is taken.
        bucket: Requests of equal buckets can run together: everything of their inputs but the number of rows.
        rows: The number of rows, which stay together. At least 1.
        size: The bytes of its inputs.
        priority: 1 is served first. Equal priorities are served in order.
        deadline: The time by which the answer must be there; None: it may take as long as it takes.
        arrived: The time at which it was submitted.
    """

    payload: T
    bucket: Hashable
    rows: int
    size: int
    priority: int
    deadline: float | None
    arrived: float


@dataclass(frozen=True, eq=False)
class Batch(Generic[T]):
    """Requests that run together."""

    bucket: Hashable
    tickets: tuple[Ticket[T], ...]
    taken: float

    @property
    def rows(self) -> int:
        """The number of rows of all requests."""
        return sum(ticket.rows for ticket in self.tickets)


class QueueFull(Exception):
    """As many rows or bytes wait as may."""


class Batcher(Generic[T]):
    """The queue of one model.

    No request waits while a runner is free, unless `max_delay` says so. A batch is closed when a runner takes it.
    """

    def __init__(self, limits: BatchLimits, max_rows: int) -> None:
        """`max_rows` is the most rows of a batch; 1 where the model is not batched."""
        raise NotImplementedError

    def submit(self, ticket: Ticket[T]) -> None:
        """Puts a request into the queue.

        Raises:
            QueueFull: As many rows or bytes wait as may.
            ValueError: The request has more rows than a batch.
        """
        raise NotImplementedError

    def take(self, now: float) -> Batch[T] | None:
        """Returns what a free runner should run now, or None. Late requests are never in it: see `late`."""
        raise NotImplementedError

    def finished(self, batch: Batch[T], seconds: float) -> None:
        """Records how long a batch took, for expecting which requests will be late."""
        raise NotImplementedError

    def cancel(self, ticket: Ticket[T]) -> bool:
        """Removes a request that waits. Returns False if it runs or ran."""
        raise NotImplementedError

    def late(self, now: float) -> list[Ticket[T]]:
        """Removes and returns the requests whose deadline passed, or will have passed when they could be answered."""
        raise NotImplementedError

    def next_event(self, now: float) -> float | None:
        """Returns when `take` or `late` may first return something new without another call; None: never."""
        raise NotImplementedError

    @property
    def queued_rows(self) -> int:
        """The rows that wait."""
        raise NotImplementedError

    @property
    def queued_bytes(self) -> int:
        """The bytes of inputs that wait."""
        raise NotImplementedError
