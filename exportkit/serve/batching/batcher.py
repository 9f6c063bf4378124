"""The queue of one model: which requests run together, and when.

A state machine that takes the time as an argument, so that tests can choose it. The caller holds a lock.
docs/adr/0028-batching.md has the reasons for its rules.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

from exportkit.serve.batching.batch_benefit import BatchBenefit
from exportkit.serve.batching.estimates import Estimates
from exportkit.serve.batching.lanes import Lane, Schedule, Waiter
from exportkit.serve.batching.tickets import Batch, BatchLimits, Ticket

__all__ = ["Batch", "Batcher", "BatcherFullError", "Ticket"]

T = TypeVar("T")

MOST_PASSED_OVER = (
    8  # So many batches in a row may pass over the request that has waited longest, for a higher priority.
)


class BatcherFullError(Exception):
    """As many rows or bytes wait as may."""


class Batcher(Generic[T]):
    """The queue of one model.

    No request waits while a runner is free, unless `max_delay` says so. A batch is closed when a runner takes it.
    """

    def __init__(self, limits: BatchLimits, max_rows: int) -> None:
        """Nothing waits.

        Args:
            limits: The limits.
            max_rows: The most rows of a batch; 1 where the model is not batched. The limits may lower it.
        """
        self._limits = limits
        self._max_rows = max_rows if limits.max_rows is None else min(max_rows, limits.max_rows)
        self._estimates = Estimates()
        self._benefit = BatchBenefit()
        self._waiters: OrderedDict[Ticket[T], Waiter[T]] = OrderedDict()  # in the order of their numbers
        self._lanes: dict[Hashable, Lane[T]] = {}  # those in which a request waits
        self._heads: Schedule[T] = Schedule()  # by priority; has the first request of each lane that may run
        self._latest_starts: Schedule[T] = Schedule()  # of the requests with a deadline
        self._delays: Schedule[T] = Schedule()  # by when they end; empty without `max_delay`
        self._late: dict[Ticket[T], None] = {}  # found by `take`, not returned by `late` yet
        self._number = 0
        self._passed_over = 0
        self._rows = 0
        self._bytes = 0

    @property
    def max_rows(self) -> int:
        """The most rows of a batch, and so of a request."""
        return self._max_rows

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

    @property
    def delay(self) -> float:
        """Seconds after which a request without a deadline waits for others no more; infinite: it does not at all."""
        return self._limits.max_delay if self._limits.max_delay > 0 else math.inf

    @property
    def timed(self) -> bool:
        """Whether the time alone may change what waits: a request has a deadline, or waits for others."""
        return bool(self._late or self._latest_starts or self._delays)

    def submit(self, ticket: Ticket[T]) -> None:
        """Puts a request into the queue. An empty queue takes every request that a batch has room for.

        Raises:
            BatcherFullError: As many rows or bytes wait as may.
            ValueError: The request has more rows than a batch or none, its deadline is NaN, or it waits already.
        """
        self._check(ticket)
        lane = self._lanes.get(ticket.bucket)
        if lane is None:
            lane = self._lanes[ticket.bucket] = Lane(ticket.bucket)
        self._number += 1
        waiter = self._waiters[ticket] = Waiter(ticket, lane, self._number)
        first = lane.add(waiter)
        self._rows += ticket.rows
        self._bytes += ticket.size
        latest = self._latest_start(ticket, ticket.arrived)
        if latest < math.inf:
            self._latest_starts.push(latest, waiter)
        if self._limits.max_delay > 0:
            # At most half of the time that the deadline leaves is spent on waiting for others.
            delay = min(self._limits.max_delay, max(0.0, latest - ticket.arrived) / 2)
            self._delays.push(ticket.arrived + delay, waiter)
        if first or lane.rows >= self._max_rows:
            self._list_head(lane)

    def take(self, now: float) -> Batch[T] | None:
        """Returns what a free runner should run now, or None. Late requests are never in it: see `late`."""
        self._end_delays(now)
        while True:
            first = self._choose()
            if first is None:
                return None
            lane = first.lane
            tickets = self._fill(first, now)
            if tickets:
                return Batch(lane.bucket, tickets, now)

    def finished(self, batch: Batch[T], seconds: float) -> None:
        """Records how long a batch took, for expecting which requests will be late, and which gain by a batch."""
        self._estimates.record(batch.bucket, batch.rows, seconds, batch.taken + seconds)
        if self._max_rows > 1:
            self._benefit.record(batch.bucket, len(batch.tickets), batch.rows, seconds)

    def cancel(self, ticket: Ticket[T]) -> bool:
        """Removes a request that waits. Returns False if it runs or ran."""
        if ticket in self._late:
            del self._late[ticket]
            return True
        waiter = self._waiters.get(ticket)
        if waiter is None:
            return False
        self._remove(waiter.lane, [waiter])
        return True

    def late(self, now: float) -> list[Ticket[T]]:
        """Removes and returns the requests whose deadline passed, or will have passed when they could be answered."""
        late, self._late = list(self._late), {}
        while (first := self._latest_starts.first()) is not None and first[0] <= now:
            waiter = first[1]
            self._latest_starts.pop()
            latest = self._latest_start(waiter.ticket, now)
            if latest <= now:
                late += self._remove(waiter.lane, [waiter])
            else:  # batches have become faster since
                self._latest_starts.push(latest, waiter)
        return late

    def next_event(self, now: float) -> float | None:
        """Returns when `take` or `late` may first return something new without another call; None: never."""
        if self._end_delays(now) or self._late:
            return now
        firsts = [first[0] for first in (self._latest_starts.first(), self._delays.first()) if first is not None]
        return max(now, min(firsts)) if firsts else None

    def _check(self, ticket: Ticket[T]) -> None:
        if not 1 <= ticket.rows <= self._max_rows:
            raise ValueError(f"the request has {ticket.rows} rows, and a batch has 1 to {self._max_rows}")
        if ticket.deadline is not None and math.isnan(ticket.deadline):
            raise ValueError("the request's deadline is not a number")
        if ticket in self._waiters or ticket in self._late:
            raise ValueError("the request waits already")
        limits = self._limits
        if self._waiters and self._rows + ticket.rows > limits.max_queued_rows:
            raise BatcherFullError(
                f"{self._rows} rows wait, and at most {limits.max_queued_rows} may: no room for {ticket.rows} more"
            )
        if self._waiters and self._bytes + ticket.size > limits.max_queued_bytes:
            raise BatcherFullError(
                f"{self._bytes} bytes wait, and at most {limits.max_queued_bytes} may: no room for {ticket.size} more"
            )

    def _latest_start(self, ticket: Ticket[T], now: float) -> float:
        """Returns the time at which it is too late to start a request, even alone."""
        if ticket.deadline is None:
            return math.inf
        return ticket.deadline - self._estimates.seconds(ticket.bucket, ticket.rows, now)

    def _may_run(self, lane: Lane[T]) -> bool:
        return not self._limits.max_delay > 0 or lane.overdue > 0 or lane.rows >= self._max_rows

    def _end_delays(self, now: float) -> bool:
        """Finds the requests that have waited for others as long as they may. Returns whether there were new ones."""
        if not self._limits.max_delay > 0:
            return False
        found = False
        while (first := self._delays.first()) is not None and first[0] <= now:
            self._delays.pop()
            waiter = first[1]
            waiter.overdue = True
            waiter.lane.overdue += 1
            self._list_head(waiter.lane)
            found = True
        return found

    def _list_head(self, lane: Lane[T]) -> None:
        """Lists the first request of a lane among those from which the next batch is chosen, if the lane may run."""
        if self._may_run(lane):
            head = next(iter(lane), None)
            if head is not None and not head.listed:
                head.listed = True
                self._heads.push(head.ticket.priority, head)

    def _choose(self) -> Waiter[T] | None:
        """Returns the request with which the next batch begins: the oldest of the highest priority, in any lane.

        One of `MOST_PASSED_OVER` + 1 batches begins with the oldest request of all, so that no priority waits for ever.
        """
        while (first := self._heads.first()) is not None:
            head = first[1]
            if self._may_run(head.lane):
                break
            self._heads.pop()
            head.listed = False
        else:
            return None
        oldest = next(iter(self._waiters.values()))
        if oldest is head or not self._may_run(oldest.lane):
            return head
        self._passed_over += 1
        if self._passed_over <= MOST_PASSED_OVER:
            return head
        self._passed_over = 0
        return oldest

    def _fill(self, first: Waiter[T], now: float) -> tuple[Ticket[T], ...]:
        """Removes the requests of the next batch from the queue, and those of its lane that are too late to start.

        A request that does not fit is passed over by younger ones that do. It then begins the lane's next batch, or is
        nearer to it, so it is passed over no more often than there were requests before it.
        """
        chosen: list[Waiter[T]] = []
        late: list[Waiter[T]] = []
        rows, misfits = 0, 0
        deadline = math.inf
        for waiter in _beginning_with(first):
            ticket = waiter.ticket
            if self._latest_start(ticket, now) <= now:
                late.append(waiter)
                continue
            together = rows + ticket.rows
            until = deadline if ticket.deadline is None else min(deadline, ticket.deadline)
            if together <= self._max_rows and self._ready_by(until, ticket.bucket, together, now, alone=not chosen):
                if len(chosen) == 1 and not self._decide_together(ticket.bucket):
                    break
                chosen.append(waiter)
                rows, deadline = together, until
            else:
                misfits += 1
            if rows == self._max_rows or misfits > self._max_rows:  # a long look for a small gap does not pay
                break
        removed = self._remove(first.lane, late + chosen)
        self._late.update(dict.fromkeys(removed[: len(late)]))
        return tuple(removed[len(late) :])

    def _decide_together(self, bucket: Hashable) -> bool:
        """Decides whether a request runs with others. With `max_delay`, it was asked for."""
        return self._limits.max_delay > 0 or self._benefit.decide_together(bucket)

    def _ready_by(self, deadline: float, bucket: Hashable, rows: int, now: float, *, alone: bool) -> bool:
        return alone or deadline == math.inf or now + self._estimates.seconds(bucket, rows, now) < deadline

    def _remove(self, lane: Lane[T], waiters: list[Waiter[T]]) -> list[Ticket[T]]:
        """Removes requests of a lane from the queue and returns them, in the same order."""
        tickets = []
        for waiter in waiters:
            ticket = waiter.ticket
            del self._waiters[ticket]
            lane.remove(waiter)
            waiter.leave()
            self._rows -= ticket.rows
            self._bytes -= ticket.size
            tickets.append(ticket)
        if lane.rows == 0:
            del self._lanes[lane.bucket]
        else:
            self._list_head(lane)
        return tickets


def _beginning_with(first: Waiter[T]) -> Iterator[Waiter[T]]:
    """Yields the requests of a lane in their order, one of them before all others."""
    yield first
    for waiter in first.lane:
        if waiter is not first:
            yield waiter
