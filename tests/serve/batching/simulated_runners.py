"""Runners on a virtual clock, which take their work from a queue as a server's runners do."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from exportkit.serve.batching.batcher import BatcherFullError
from exportkit.serve.batching.pending import Batch, PendingRequest


@dataclass(eq=False)
class Numbered(PendingRequest):
    """A request, with the number of its arrival."""

    index: int


@dataclass(frozen=True)
class Arrival:
    """A request that is submitted at `time`, and cancelled `cancelled_after` seconds later unless it runs by then."""

    time: float
    shape: object
    rows: int = 1
    size: int = 1
    priority: int = 2
    timeout: float | None = None
    cancelled_after: float | None = None


class Queue(Protocol):
    """What the simulation asks of a queue. `Batcher` is one."""

    @property
    def queued_rows(self) -> int: ...
    def submit(self, pending: Numbered) -> None: ...
    def take(self, now: float) -> Batch[Numbered] | None: ...
    def finished(self, batch: Batch[Numbered], seconds: float) -> None: ...
    def cancel(self, pending: Numbered) -> bool: ...
    def late(self, now: float) -> list[Numbered]: ...
    def next_event(self, now: float) -> float | None: ...


@dataclass
class Outcome:
    """What became of the arrivals. Each request has its arrival's index."""

    accepted: list[Numbered] = field(default_factory=list)  # those that were accepted
    batches: list[Batch[Numbered]] = field(default_factory=list)
    late: list[tuple[float, Numbered]] = field(default_factory=list)
    cancelled: list[Numbered] = field(default_factory=list)
    refused: list[Numbered] = field(default_factory=list)
    batches_before: dict[int, int] = field(default_factory=dict)  # batches that were taken before a request came
    idle_while_waiting: int = 0  # moments at which a runner was free and a request waited

    @property
    def mean_rows(self) -> float:
        return sum(batch.rows for batch in self.batches) / len(self.batches)


def simulate(
    queue: Queue, arrivals: Sequence[Arrival], runners: int, service: Callable[[object, int], float]
) -> Outcome:
    """Runs until nothing is left to do. `service` says how many seconds a batch of a shape and rows takes."""
    outcome = Outcome()
    count = itertools.count()
    events: list[tuple[float, int, Callable[[float], None]]] = []
    free = runners
    alarm: float | None = None

    def at(time: float, action: Callable[[float], None]) -> None:
        heapq.heappush(events, (time, next(count), action))

    def submit(index: int, arrival: Arrival, now: float) -> None:
        deadline = None if arrival.timeout is None else now + arrival.timeout
        pending = Numbered(arrival.shape, arrival.rows, arrival.size, arrival.priority, deadline, now, index)
        try:
            queue.submit(pending)
        except BatcherFullError:
            outcome.refused.append(pending)
            return
        outcome.accepted.append(pending)
        outcome.batches_before[index] = len(outcome.batches)
        if arrival.cancelled_after is not None:
            at(now + arrival.cancelled_after, lambda _: cancel(pending))

    def cancel(pending: Numbered) -> None:
        if queue.cancel(pending):
            outcome.cancelled.append(pending)

    def finish(batch: Batch[Numbered], now: float) -> None:
        nonlocal free
        free += 1
        queue.finished(batch, now - batch.taken)

    def wake_up(_: float) -> None:
        nonlocal alarm
        alarm = None

    for index, arrival in enumerate(arrivals):
        at(arrival.time, lambda now, index=index, arrival=arrival: submit(index, arrival, now))
    while events:
        now, _, action = heapq.heappop(events)
        action(now)
        while events and events[0][0] == now:
            heapq.heappop(events)[2](now)
        while free and (batch := queue.take(now)) is not None:
            free -= 1
            outcome.batches.append(batch)
            at(now + service(batch.shape, batch.rows), lambda then, batch=batch: finish(batch, then))
        outcome.late += [(now, pending) for pending in queue.late(now)]
        outcome.idle_while_waiting += bool(free and queue.queued_rows)
        event = queue.next_event(now)
        if event is not None and event != alarm:
            alarm = event
            at(event, wake_up)
    return outcome
