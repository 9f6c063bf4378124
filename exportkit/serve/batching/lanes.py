"""The waiting requests of one bucket, in the order in which they run, and heaps that forget lazily."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

from exportkit.serve.batching.tickets import Ticket

T = TypeVar("T")


class Waiter(Generic[T]):
    """A request that waits.

    Attributes:
        ticket: The request.
        lane: The others of its bucket.
        number: Counts the requests in the order in which they were submitted.
        waiting: Turns False when the request leaves the queue.
        listed: Whether it is among those from which the next batch is chosen.
        overdue: Whether it has waited for others as long as it may.
    """

    __slots__ = ("lane", "listed", "number", "overdue", "ticket", "waiting")

    def __init__(self, ticket: Ticket[T], lane: Lane[T], number: int) -> None:
        self.ticket = ticket
        self.lane = lane
        self.number = number
        self.waiting = True
        self.listed = False
        self.overdue = False

    def leave(self) -> None:
        """Leaves the queue. The request is forgotten: a schedule may hold the waiter for long."""
        self.waiting = False
        del self.ticket, self.lane


class Lane(Generic[T]):
    """The waiting requests of one bucket, by priority and then by number. Adding and removing take constant time.

    Attributes:
        bucket: The bucket.
        rows: The rows that wait.
        overdue: How many of the requests are overdue.
    """

    __slots__ = ("_priorities", "_queues", "bucket", "overdue", "rows")

    def __init__(self, bucket: Hashable) -> None:
        self.bucket = bucket
        self.rows = 0
        self.overdue = 0
        self._queues: dict[int, OrderedDict[int, Waiter[T]]] = {}
        self._priorities: list[int] = []  # of the queues, sorted

    def __iter__(self) -> Iterator[Waiter[T]]:
        for priority in self._priorities:
            yield from self._queues[priority].values()

    def add(self, waiter: Waiter[T]) -> bool:
        """Adds the newest request. Returns whether it is the first in the order."""
        priority = waiter.ticket.priority
        queue = self._queues.get(priority)
        if queue is None:
            queue = self._queues[priority] = OrderedDict()
            insort(self._priorities, priority)
        queue[waiter.number] = waiter
        self.rows += waiter.ticket.rows
        return len(queue) == 1 and self._priorities[0] == priority

    def remove(self, waiter: Waiter[T]) -> None:
        """Removes a request that is there."""
        priority = waiter.ticket.priority
        queue = self._queues[priority]
        del queue[waiter.number]
        if not queue:
            del self._queues[priority]
            del self._priorities[bisect_left(self._priorities, priority)]
        self.rows -= waiter.ticket.rows
        self.overdue -= waiter.overdue


class Schedule(Generic[T]):
    """QueuedRequest requests by a number, smallest first. Those that left the queue are forgotten when they come up.

    When most have left it, all of those are forgotten at once, so that memory stays in proportion to the queue.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Waiter[T]]] = []
        self._limit = 64

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, key: float, waiter: Waiter[T]) -> None:
        """Adds a request."""
        if len(self._heap) >= self._limit:
            self._heap = [item for item in self._heap if item[2].waiting]
            heapify(self._heap)
            self._limit = 2 * len(self._heap) + 64
        heappush(self._heap, (key, waiter.number, waiter))

    def first(self) -> tuple[float, Waiter[T]] | None:
        """Returns the smallest number and its request; None: no request is there."""
        heap = self._heap
        while heap:
            key, _, waiter = heap[0]
            if waiter.waiting:
                return key, waiter
            heappop(heap)
        return None

    def pop(self) -> None:
        """Removes what `first` returned."""
        heappop(self._heap)
