"""The rules of the batcher once more, as plainly as they can be said: a list that is searched again and again."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from exportkit.serve.batching.batcher import MOST_PASSED_OVER, Ticket
from exportkit.serve.batching.tickets import BatchLimits


@dataclass
class NaiveQueue:
    limits: BatchLimits
    max_rows: int
    waiting: list[Ticket[int]] = field(default_factory=list)  # in the order of submission
    delayed_until: dict[Ticket[int], float] = field(default_factory=dict)
    found_late: list[Ticket[int]] = field(default_factory=list)
    measured: list[tuple[object, int, float, float]] = field(default_factory=list)  # bucket, rows, seconds, when
    runs: list[tuple[object, int, float, int]] = field(default_factory=list)  # bucket, requests, seconds, rows
    # Of the last trial: whether requests run together in it, the runs that are left, and the runs of the bucket before.
    trials: dict[object, tuple[bool, int, int]] = field(default_factory=dict)
    passed_over: int = 0

    def has_room(self, ticket: Ticket[int]) -> bool:
        rows = sum(other.rows for other in self.waiting) + ticket.rows
        size = sum(other.size for other in self.waiting) + ticket.size
        return not self.waiting or (rows <= self.limits.max_queued_rows and size <= self.limits.max_queued_bytes)

    def submit(self, ticket: Ticket[int]) -> None:
        self.waiting.append(ticket)
        left = self.latest_start(ticket, ticket.arrived) - ticket.arrived
        self.delayed_until[ticket] = ticket.arrived + min(self.limits.max_delay, max(0.0, left / 2))

    def remove(self, tickets: list[Ticket[int]]) -> None:
        self.waiting = [ticket for ticket in self.waiting if ticket not in tickets]
        self.found_late = [ticket for ticket in self.found_late if ticket not in tickets]

    def take(self, now: float) -> list[Ticket[int]]:
        while may_run := [ticket for ticket in self.waiting if self.may_run(ticket, now)]:
            first = min(may_run, key=lambda ticket: (ticket.priority, self.waiting.index(ticket)))
            if first is not self.waiting[0] and self.waiting[0] in may_run:
                self.passed_over += 1
                if self.passed_over > MOST_PASSED_OVER:
                    first, self.passed_over = self.waiting[0], 0
            batch, late = self.batch(first, now)
            self.remove(batch + late)
            self.found_late += late
            if batch:
                return batch
        return []

    def may_run(self, ticket: Ticket[int], now: float) -> bool:
        others = [other for other in self.waiting if other.bucket == ticket.bucket]
        full = sum(other.rows for other in others) >= self.max_rows
        return self.limits.max_delay == 0 or full or any(self.delayed_until[other] <= now for other in others)

    def batch(self, first: Ticket[int], now: float) -> tuple[list[Ticket[int]], list[Ticket[int]]]:
        others = [ticket for ticket in self.waiting if ticket.bucket == first.bucket and ticket is not first]
        others.sort(key=lambda ticket: ticket.priority)  # keeps the order of equal ones
        batch: list[Ticket[int]] = []
        late = []
        misfits = 0
        for ticket in [first, *others]:
            rows = sum(other.rows for other in batch)
            if rows == self.max_rows or misfits > self.max_rows:
                break
            if self.is_late(ticket, now):
                late.append(ticket)
            elif rows + ticket.rows > self.max_rows or (batch and not self.in_time([*batch, ticket], now)):
                misfits += 1
            elif len(batch) == 1 and not self.together(ticket.bucket):
                break
            else:
                batch.append(ticket)
        return batch, late

    def together(self, bucket: object) -> bool:
        """Whether requests run together: if that is at least nearly as fast a row, or in a trial of it."""
        if self.limits.max_delay:
            return True
        way, left, began = self.trials.get(bucket, (True, 0, 0))
        if left:
            self.trials[bucket] = way, left - 1, began
            return way
        runs = [run for run in self.runs if run[0] == bucket]
        both, alone = (
            [(seconds, rows) for _, count, seconds, rows in runs if (count > 1) is kind] for kind in (True, False)
        )
        if len(both) < 11:
            return True
        length = runs[-1][1] + 11
        better = True
        if len(alone) >= 11:
            better = self.row_time(alone) > 0.95 * self.row_time(both)
            faster, slower = (both, alone) if better else (alone, both)
            ran = sum(seconds for _, _, seconds, _ in runs[began:])
            trial = length * self.quartile([seconds for seconds, _ in slower])
            if ran / 32 * self.row_time(faster) < trial * self.row_time(slower):
                return better
        self.trials[bucket] = not better, length - 1, len(runs)
        return not better

    def row_time(self, runs: list[tuple[float, int]]) -> float:
        return self.quartile([seconds / rows for seconds, rows in runs])

    def quartile(self, times: list[float]) -> float:
        last = sorted(times[-11:])
        return last[(len(last) - 1) // 4]

    def in_time(self, batch: list[Ticket[int]], now: float) -> bool:
        expected = now + self.expected(batch[0].bucket, sum(ticket.rows for ticket in batch), now)
        return all(ticket.deadline is None or expected < ticket.deadline for ticket in batch)

    def is_late(self, ticket: Ticket[int], now: float) -> bool:
        return self.latest_start(ticket, now) <= now

    def latest_start(self, ticket: Ticket[int], now: float) -> float:
        return math.inf if ticket.deadline is None else ticket.deadline - self.expected(ticket.bucket, ticket.rows, now)

    def expected(self, bucket: object, rows: int, now: float) -> float:
        """The mean of the batches with the same power of two, or of the next smaller ones that are known."""
        power = 1
        while power < rows:
            power *= 2
        while power:
            alike = [
                (seconds, when)
                for other, count, seconds, when in self.measured
                if other == bucket and power / 2 < count <= power
            ]
            mean, count, since = 0.0, 0, 0.0
            for seconds, when in alike:
                if count == 0:
                    mean = seconds
                elif count == 1 or when - since > min(max(10 * mean, 1.0), 60.0):
                    mean = min(mean, seconds)
                else:
                    mean += (min(seconds, 4 * max(mean, 1e-3)) - mean) / 4
                count, since = count + 1, when
            if count > 1 and now - since <= min(max(10 * mean, 1.0), 60.0):
                return mean
            power //= 2
        return 0.0
