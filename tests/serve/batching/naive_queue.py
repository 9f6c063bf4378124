"""The rules of the batcher once more, as plainly as they can be said: a list that is searched again and again."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from exportkit.serve.batching.batcher import MOST_PASSED_OVER
from exportkit.serve.batching.pending import BatchLimits
from tests.serve.batching.simulated_runners import Numbered


@dataclass
class NaiveQueue:
    limits: BatchLimits
    max_rows: int
    waiting: list[Numbered] = field(default_factory=list)  # in the order of submission
    delayed_until: dict[Numbered, float] = field(default_factory=dict)
    found_late: list[Numbered] = field(default_factory=list)
    measured: list[tuple[object, int, float, float]] = field(default_factory=list)  # shape, rows, seconds, when
    runs: list[tuple[object, int, float, int]] = field(default_factory=list)  # shape, requests, seconds, rows
    # Of the last trial: whether requests run together in it, the runs that are left, and the runs of the shape before.
    trials: dict[object, tuple[bool, int, int]] = field(default_factory=dict)
    passed_over: int = 0

    def has_room(self, pending: Numbered) -> bool:
        rows = sum(other.rows for other in self.waiting) + pending.rows
        size = sum(other.size for other in self.waiting) + pending.size
        return not self.waiting or (rows <= self.limits.max_queued_rows and size <= self.limits.max_queued_bytes)

    def submit(self, pending: Numbered) -> None:
        self.waiting.append(pending)
        left = self.latest_start(pending, pending.arrived) - pending.arrived
        self.delayed_until[pending] = pending.arrived + min(self.limits.max_delay, max(0.0, left / 2))

    def remove(self, requests: list[Numbered]) -> None:
        self.waiting = [pending for pending in self.waiting if pending not in requests]
        self.found_late = [pending for pending in self.found_late if pending not in requests]

    def take(self, now: float) -> list[Numbered]:
        while may_run := [pending for pending in self.waiting if self.may_run(pending, now)]:
            first = min(may_run, key=lambda pending: (pending.priority, self.waiting.index(pending)))
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

    def may_run(self, pending: Numbered, now: float) -> bool:
        others = [other for other in self.waiting if other.shape == pending.shape]
        full = sum(other.rows for other in others) >= self.max_rows
        return self.limits.max_delay == 0 or full or any(self.delayed_until[other] <= now for other in others)

    def batch(self, first: Numbered, now: float) -> tuple[list[Numbered], list[Numbered]]:
        others = [pending for pending in self.waiting if pending.shape == first.shape and pending is not first]
        others.sort(key=lambda pending: pending.priority)  # keeps the order of equal ones
        batch: list[Numbered] = []
        late = []
        misfits = 0
        for pending in [first, *others]:
            rows = sum(other.rows for other in batch)
            if rows == self.max_rows or misfits > self.max_rows:
                break
            if self.is_late(pending, now):
                late.append(pending)
            elif rows + pending.rows > self.max_rows or (batch and not self.in_time([*batch, pending], now)):
                misfits += 1
            elif len(batch) == 1 and not self.together(pending.shape):
                break
            else:
                batch.append(pending)
        return batch, late

    def together(self, shape: object) -> bool:
        """Whether requests run together: if that is at least nearly as fast a row, or in a trial of it."""
        if self.limits.max_delay:
            return True
        way, left, began = self.trials.get(shape, (True, 0, 0))
        if left:
            self.trials[shape] = way, left - 1, began
            return way
        runs = [run for run in self.runs if run[0] == shape]
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
        self.trials[shape] = not better, length - 1, len(runs)
        return not better

    def row_time(self, runs: list[tuple[float, int]]) -> float:
        return self.quartile([seconds / rows for seconds, rows in runs])

    def quartile(self, times: list[float]) -> float:
        last = sorted(times[-11:])
        return last[(len(last) - 1) // 4]

    def in_time(self, batch: list[Numbered], now: float) -> bool:
        expected = now + self.expected(batch[0].shape, sum(pending.rows for pending in batch), now)
        return all(pending.deadline is None or expected < pending.deadline for pending in batch)

    def is_late(self, pending: Numbered, now: float) -> bool:
        return self.latest_start(pending, now) <= now

    def latest_start(self, pending: Numbered, now: float) -> float:
        if pending.deadline is None:
            return math.inf
        return pending.deadline - self.expected(pending.shape, pending.rows, now)

    def expected(self, shape: object, rows: int, now: float) -> float:
        """The mean of the batches with the same power of two, or of the next smaller ones that are known."""
        power = 1
        while power < rows:
            power *= 2
        while power:
            alike = [
                (seconds, when)
                for other, count, seconds, when in self.measured
                if other == shape and power / 2 < count <= power
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
