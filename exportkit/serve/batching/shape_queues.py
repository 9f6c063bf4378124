"""The waiting requests of one shape, in the order in which they run, and heaps that forget lazily."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Container, Hashable, Iterator
from heapq import heapify, heappop, heappush
from typing import Generic

from exportkit.serve.batching.pending import R


class ShapeQueue(Generic[R]):
    """The waiting requests of one shape, by priority and then by number. Adding and removing take constant time.

    Attributes:
        shape: The shape.
        rows: The rows that wait.
        overdue: How many of the requests are overdue.
    """

    def __init__(self, shape: Hashable) -> None:
        self.shape = shape
        self.rows = 0
        self.overdue = 0
        self._queues: dict[int, OrderedDict[int, R]] = {}
        self._priorities: list[int] = []  # of the queues, sorted

    def __iter__(self) -> Iterator[R]:
        for priority in self._priorities:
            yield from self._queues[priority].values()

    def add(self, request: R) -> bool:
        """Adds the newest request. Returns whether it is the first in the order."""
        queue = self._queues.get(request.priority)
        if queue is None:
            queue = self._queues[request.priority] = OrderedDict()
            insort(self._priorities, request.priority)
        queue[request.number] = request
        self.rows += request.rows
        return len(queue) == 1 and self._priorities[0] == request.priority

    def remove(self, request: R) -> None:
        """Removes a request that is there."""
        queue = self._queues[request.priority]
        del queue[request.number]
        if not queue:
            del self._queues[request.priority]
            del self._priorities[bisect_left(self._priorities, request.priority)]
        self.rows -= request.rows
        self.overdue -= request.overdue


class Schedule:
    """Numbers of waiting requests by a key, smallest first. Those that left are forgotten when they come up.

    When most have left, all of those are forgotten at once, so that memory stays in proportion to the queue.
    """

    def __init__(self, waiting: Container[int]) -> None:
        """`waiting` has the numbers of the requests that wait."""
        self._waiting = waiting
        self._heap: list[tuple[float, int]] = []
        self._limit = 64

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, key: float, number: int) -> None:
        """Adds a request."""
        if len(self._heap) >= self._limit:
            self._heap = [item for item in self._heap if item[1] in self._waiting]
            heapify(self._heap)
            self._limit = 2 * len(self._heap) + 64
        heappush(self._heap, (key, number))

    def first(self) -> tuple[float, int] | None:
        """Returns the smallest key and its request; None: no request is there."""
        heap = self._heap
        while heap and heap[0][1] not in self._waiting:
            heappop(heap)
        return heap[0] if heap else None

    def pop(self) -> None:
        """Removes what `first` returned."""
        heappop(self._heap)
