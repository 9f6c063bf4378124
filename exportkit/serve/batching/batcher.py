"""The queue of one model: which requests run together, and when.

A state machine that takes the time as an argument, so that tests can choose it. The caller holds a lock.
docs/adr/0028-batching.md has the reasons for its rules.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Container, Hashable, Iterator
from heapq import heapify, heappop, heappush
from itertools import chain
from typing import Generic

from exportkit.serve.batching.batch_benefit import BatchBenefit, Estimates
from exportkit.serve.batching.pending import Batch, BatchLimits, R

# So many batches in a row may pass over the request that has waited longest, for a higher priority.
MOST_PASSED_OVER = 8


class BatcherFullError(Exception):
    """As many rows or bytes wait as may."""


class Batcher(Generic[R]):
    """The queue of one model.

    No request waits while a runner is free, unless `max_delay` says so. A batch is closed when a runner takes it.
    """

    def __init__(self, limits: BatchLimits, max_rows: int) -> None:
        """Nothing waits.

        Args:
            limits: What may wait, and for how long.
            max_rows: The most rows of a batch; 1 where the model is not batched.
        """
        self._limits = limits
        self._max_rows = max_rows
        self._estimates = Estimates()
        self._benefit = BatchBenefit()
        self._waiting: OrderedDict[int, R] = OrderedDict()  # by number
        self._queues: dict[Hashable, ShapeQueue[R]] = {}  # those in which a request waits
        self._heads = Schedule(self._waiting)  # by priority; has the first request of each queue that may run
        self._latest_starts = Schedule(self._waiting)  # of the requests with a deadline
        self._delays = Schedule(self._waiting)  # by when they end; empty without `max_delay`
        self._late: dict[R, None] = {}  # found by `take`, not returned by `late` yet
        self._number = 0
        self._passed_over = 0
        self._rows = 0
        self._bytes = 0

    def __iter__(self) -> Iterator[R]:
        """Yields the requests that wait."""
        return iter([*self._waiting.values(), *self._late])

    @property
    def queued_rows(self) -> int:
        """The rows that wait."""
        return self._rows

    @property
    def queued_bytes(self) -> int:
        """The bytes of inputs that wait."""
        return self._bytes

    @property
    def may_take(self) -> bool:
        """Whether `take` may return a batch: not if all wait for others. To wake a runner for nothing is costly."""
        return self._heads.first() is not None

    def submit(self, request: R) -> None:
        """Puts a request into the queue. An empty queue takes every request that a batch has room for.

        Raises:
            BatcherFullError: As many rows or bytes wait as may.
            ValueError: The request has more rows than a batch or none, or its deadline is NaN.
        """
        self._check(request)
        self._number += 1
        request.number = self._number
        self._waiting[request.number] = request
        queue = self._queues.get(request.shape)
        if queue is None:
            queue = self._queues[request.shape] = ShapeQueue(request.shape)
        first = queue.add(request)
        self._rows += request.rows
        self._bytes += request.size
        latest = self._latest_start(request, request.arrived)
        if latest < math.inf:
            self._latest_starts.push(latest, request.number)
        if self._limits.max_delay > 0:
            # At most half of the time that the deadline leaves is spent on waiting for others.
            delay = min(self._limits.max_delay, max(0.0, latest - request.arrived) / 2)
            self._delays.push(request.arrived + delay, request.number)
        if first or queue.rows >= self._max_rows:
            self._list_head(queue)

    def take(self, now: float) -> Batch[R] | None:
        """Returns what a free runner should run now, or None. Late requests are never in it: see `late`."""
        self._end_delays(now)
        while (first := self._choose()) is not None:
            if requests := self._fill(first, now):
                return Batch(first.shape, requests, now)
        return None

    def finished(self, batch: Batch[R], seconds: float) -> None:
        """Records how long a batch took, for expecting which requests will be late, and which gain by a batch."""
        self._estimates.record(batch.shape, batch.rows, seconds, batch.taken + seconds)
        if self._max_rows > 1:
            self._benefit.record(batch.shape, len(batch.requests), batch.rows, seconds)

    def cancel(self, request: R) -> bool:
        """Removes a request that waits. Returns False if it runs or ran."""
        if request in self._late:
            del self._late[request]
            return True
        if request.number not in self._waiting:
            return False
        self._remove([request])
        return True

    def late(self, now: float) -> list[R]:
        """Removes and returns the requests whose deadline passed, or will have passed when they could be answered."""
        late, self._late = list(self._late), {}
        while (first := self._latest_starts.first()) is not None and first[0] <= now:
            request = self._waiting[first[1]]
            self._latest_starts.pop()
            latest = self._latest_start(request, now)
            if latest <= now:
                late += self._remove([request])
            else:  # batches have become faster since
                self._latest_starts.push(latest, request.number)
        return late

    def next_event(self, now: float) -> float | None:
        """Returns when `take` or `late` may first return something new without another call; None: never."""
        if self._end_delays(now) or self._late:
            return now
        firsts = [first[0] for first in (self._latest_starts.first(), self._delays.first()) if first is not None]
        return max(now, min(firsts)) if firsts else None

    def _check(self, request: R) -> None:
        if not 1 <= request.rows <= self._max_rows:
            raise ValueError(f"the request has {request.rows} rows, and a batch has 1 to {self._max_rows}")
        if request.deadline is not None and math.isnan(request.deadline):
            raise ValueError("the request's deadline is not a number")
        limits = self._limits
        if self._waiting and self._rows + request.rows > limits.max_queued_rows:
            raise BatcherFullError(
                f"{self._rows} rows wait, and at most {limits.max_queued_rows} may: no room for {request.rows} more"
            )
        if self._waiting and self._bytes + request.size > limits.max_queued_bytes:
            raise BatcherFullError(
                f"{self._bytes} bytes wait, and at most {limits.max_queued_bytes} may: no room for {request.size} more"
            )

    def _latest_start(self, request: R, now: float) -> float:
        """Returns the time at which it is too late to start a request, even alone."""
        if request.deadline is None:
            return math.inf
        return request.deadline - self._estimates.seconds(request.shape, request.rows, now)

    def _may_run(self, queue: ShapeQueue[R]) -> bool:
        return not self._limits.max_delay > 0 or queue.overdue > 0 or queue.rows >= self._max_rows

    def _end_delays(self, now: float) -> bool:
        """Finds the requests that have waited for others as long as they may. Returns whether there were new ones."""
        found = False
        while (first := self._delays.first()) is not None and first[0] <= now:
            self._delays.pop()
            request = self._waiting[first[1]]
            queue = self._queues[request.shape]
            request.overdue = True
            queue.overdue += 1
            self._list_head(queue)
            found = True
        return found

    def _list_head(self, queue: ShapeQueue[R]) -> None:
        """Lists the first request of a queue among those from which the next batch is chosen, if the queue may run."""
        if self._may_run(queue):
            head = next(iter(queue), None)
            if head is not None and not head.listed:
                head.listed = True
                self._heads.push(head.priority, head.number)

    def _choose(self) -> R | None:
        """Returns the request with which the next batch begins: the oldest of the highest priority, of any shape.

        One of `MOST_PASSED_OVER` + 1 batches begins with the oldest request of all, so that no priority waits for ever.
        """
        while (first := self._heads.first()) is not None:
            head = self._waiting[first[1]]
            if self._may_run(self._queues[head.shape]):
                break
            self._heads.pop()
            head.listed = False
        else:
            return None
        oldest = next(iter(self._waiting.values()))
        if oldest is head or not self._may_run(self._queues[oldest.shape]):
            return head
        self._passed_over += 1
        if self._passed_over <= MOST_PASSED_OVER:
            return head
        self._passed_over = 0
        return oldest

    def _fill(self, first: R, now: float) -> tuple[R, ...]:
        """Removes the requests of the next batch from the queue, and those of its shape that are too late to start.

        A request that does not fit is passed over by younger ones that do. It then begins its shape's next batch, or is
        nearer to it, so it is passed over no more often than there were requests before it.
        """
        chosen: list[R] = []
        late: list[R] = []
        rows, misfits = 0, 0
        deadline = math.inf
        for request in chain([first], (each for each in self._queues[first.shape] if each is not first)):
            if self._latest_start(request, now) <= now:
                late.append(request)
                continue
            together = rows + request.rows
            until = deadline if request.deadline is None else min(deadline, request.deadline)
            if together <= self._max_rows and self._ready_by(until, request.shape, together, now, alone=not chosen):
                if len(chosen) == 1 and not self._decide_together(request.shape):
                    break
                chosen.append(request)
                rows, deadline = together, until
            else:
                misfits += 1
            if rows == self._max_rows or misfits > self._max_rows:  # a long look for a small gap does not pay
                break
        self._remove(late + chosen)
        self._late.update(dict.fromkeys(late))
        return tuple(chosen)

    def _decide_together(self, shape: Hashable) -> bool:
        """Decides whether a request runs with others. With `max_delay`, it was asked for."""
        return self._limits.max_delay > 0 or self._benefit.decide_together(shape)

    def _ready_by(self, deadline: float, shape: Hashable, rows: int, now: float, *, alone: bool) -> bool:
        return alone or deadline == math.inf or now + self._estimates.seconds(shape, rows, now) < deadline

    def _remove(self, requests: list[R]) -> list[R]:
        """Removes requests of one shape from the queue, and returns them."""
        queue = self._queues[requests[0].shape]
        for request in requests:
            del self._waiting[request.number]
            queue.remove(request)
            self._rows -= request.rows
            self._bytes -= request.size
        if queue.rows == 0:
            del self._queues[queue.shape]
        else:
            self._list_head(queue)
        return requests


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
