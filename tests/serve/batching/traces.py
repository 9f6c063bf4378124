"""Requests whose shapes differ, and the time that a model takes for a batch of them."""

from __future__ import annotations

import random

from exportkit.serve.batching.batcher import Batcher
from exportkit.serve.batching.pending import BatchLimits
from tests.serve.batching.simulated_runners import Arrival, Outcome, TritonLikeQueue, simulate

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
