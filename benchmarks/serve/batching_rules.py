"""The mean batch and the waits of simulated requests, by our rule (ADR 0028) and by Triton's.

    python -m benchmarks.serve.batching_rules

Time is simulated, so every machine prints the same.
"""

from __future__ import annotations

import random

from exportkit.serve.batching.batcher import Batcher
from exportkit.serve.batching.pending import Batch, BatchLimits
from tests.serve.batching.simulated_runners import Arrival, Numbered, Outcome, simulate


class TritonLikeQueue:
    """Triton's dynamic batcher as its core has it (dynamic_batch_scheduler.cc): first in, first out.

    A batch begins with the oldest request and ends before the first one of another shape, or that does not fit.
    """

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._waiting: list[Numbered] = []

    @property
    def queued_rows(self) -> int:
        return sum(pending.rows for pending in self._waiting)

    def submit(self, pending: Numbered) -> None:
        self._waiting.append(pending)

    def take(self, now: float) -> Batch[Numbered] | None:
        batch: list[Numbered] = []
        for pending in self._waiting:
            rows = sum(other.rows for other in batch) + pending.rows
            if rows > self._max_rows or pending.shape != self._waiting[0].shape:
                break
            batch.append(pending)
        del self._waiting[: len(batch)]
        return Batch(batch[0].shape, tuple(batch), now) if batch else None

    def finished(self, batch: Batch[Numbered], seconds: float) -> None:
        """Learns nothing from it."""

    def cancel(self, pending: Numbered) -> bool:
        if pending in self._waiting:
            self._waiting.remove(pending)
            return True
        return False

    def late(self, now: float) -> list[Numbered]:
        return []

    def next_event(self, now: float) -> float | None:
        return None


MAX_ROWS = 8


def service(shape: object, rows: int) -> float:
    """Seconds of a batch, which costs as much as four rows more."""
    return 0.004 + 0.001 * rows


def alternating(rate: float, count: int) -> list[Arrival]:
    """Two shapes in turns, `rate` requests a second, at equal intervals."""
    return [Arrival(index / rate, "ab"[index % 2]) for index in range(count)]


def mixed(rate: float, count: int) -> list[Arrival]:
    """Poisson arrivals of six shapes, the frequent ones far more frequent, with one to four rows."""
    chance = random.Random(7)
    trace, now = [], 0.0
    for _ in range(count):
        now += chance.expovariate(rate)
        shape = chance.choices(range(6), weights=[32, 16, 8, 4, 2, 1])[0]
        trace.append(Arrival(now, shape, rows=chance.choices([1, 2, 4], weights=[6, 2, 1])[0]))
    return trace


def one_shape(rate: float, count: int) -> list[Arrival]:
    """Poisson arrivals of one shape, with one to five rows."""
    chance = random.Random(7)
    trace, now = [], 0.0
    for _ in range(count):
        now += chance.expovariate(rate)
        trace.append(Arrival(now, "a", rows=chance.choice([1, 1, 2, 5])))
    return trace


def by_both_rules(trace: list[Arrival], runners: int) -> tuple[Outcome, Outcome]:
    """Returns what becomes of the requests by our rule and by Triton's."""
    ours = simulate(Batcher(BatchLimits(max_queued_rows=10**9), MAX_ROWS), trace, runners, service)
    return ours, simulate(TritonLikeQueue(MAX_ROWS), trace, runners, service)


def waits(outcome: Outcome) -> list[float]:
    """Seconds that each request waited, in ascending order."""
    return sorted(batch.taken - ticket.arrived for batch in outcome.batches for ticket in batch.requests)


TRACES: list[tuple[str, list[Arrival], int]] = [
    ("two shapes in turns, 400/s", alternating(400, 3000), 1),
    ("two shapes in turns, 800/s", alternating(800, 3000), 1),
    *((f"six shapes, {rate}/s", mixed(rate, 3000), 2) for rate in (200, 400, 600, 1000)),
    ("one shape, 500/s", one_shape(500, 3000), 1),
]


def figures(outcome: Outcome) -> str:
    waited = waits(outcome)
    median, high = (1000 * waited[len(waited) * part // 100] for part in (50, 99))
    return f"{outcome.mean_rows:.1f} | {median:.0f} ms | {high:.0f} ms"


def main() -> None:
    print("| requests | runners | ours: mean rows | p50 | p99 | Triton's: mean rows | p50 | p99 |")
    print("| --- | --: | --: | --: | --: | --: | --: | --: |")
    for name, trace, runners in TRACES:
        ours, theirs = by_both_rules(trace, runners)
        print(f"| {name} | {runners} | {figures(ours)} | {figures(theirs)} |")


if __name__ == "__main__":
    main()
