"""A request in the queue, the requests that run together, and how many may be either."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar


@dataclass(frozen=True)
class BatchLimits:
    """The limits of one model's queue and batches.

    Attributes:
        max_rows: The most rows of a batch. None: as many as the model takes.
        max_delay: Seconds that a request may wait for others while a runner is free.
        max_queued_rows: The most rows that wait.
        max_queued_bytes: The most bytes of inputs that wait.
    """

    max_rows: int | None = None
    max_delay: float = 0.0
    max_queued_rows: int = 1024
    max_queued_bytes: int = 1 << 30


@dataclass(eq=False)
class PendingRequest:
    """A request that waits or runs. What is run is its subclass's.

    Attributes:
        shape: Requests of equal shapes can run together: everything of their inputs but the number of rows.
        rows: The number of rows, which stay together. At least 1.
        size: The bytes of its inputs.
        priority: 1 is served first. Equal priorities are served in order.
        deadline: The time by which the answer must be there; None: it may take as long as it takes.
        arrived: The time at which it was submitted.
        number: The queue's: counts the requests in the order in which they were submitted.
        listed: The queue's: whether it is among those from which the next batch is chosen.
        overdue: The queue's: whether it has waited for others as long as it may.
    """

    shape: Hashable
    rows: int
    size: int
    priority: int
    deadline: float | None
    arrived: float
    number: int = field(default=0, init=False)
    listed: bool = field(default=False, init=False)
    overdue: bool = field(default=False, init=False)


R = TypeVar("R", bound=PendingRequest)


@dataclass(frozen=True, eq=False)
class Batch(Generic[R]):
    """Requests that run together."""

    shape: Hashable
    requests: tuple[R, ...]
    taken: float

    @property
    def rows(self) -> int:
        """The number of rows of all requests."""
        return sum(request.rows for request in self.requests)
