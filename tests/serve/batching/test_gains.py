"""Requests run together where that is faster, and one by one where it is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from exportkit.serve.batching.batcher import Batcher
from exportkit.serve.batching.estimates import MOST_BUCKETS
from exportkit.serve.batching.gains import RETRY, Gains
from exportkit.serve.batching.limits import BatchLimits
from tests.serve.batching.simulated_runners import Arrival, Outcome, simulate

FLOOD = [Arrival(index * 1e-4, "a") for index in range(4000)]  # ten thousand a second, which no runner below can answer


def flooded(service: Callable[[object, int], float], max_delay: float = 0.0, runners: int = 1) -> Outcome:
    limits = BatchLimits(max_queued_rows=10**9, max_delay=max_delay)
    outcome = simulate(Batcher(limits, 8), FLOOD, runners, service)
    assert sorted(ticket.payload for batch in outcome.batches for ticket in batch.tickets) == list(range(len(FLOOD)))
    return outcome


@pytest.mark.parametrize("runners", [1, 2])
def test_requests_that_gain_nothing_run_one_by_one(runners: int):
    """Bringing inputs together costs a tenth, and a batch is no faster a row."""
    outcome = flooded(lambda bucket, rows: 0.001 * rows * (1.0 if rows == 1 else 1.1), runners=runners)
    assert outcome.mean_rows < 1.5
    assert outcome.idle_while_waiting == 0


@pytest.mark.parametrize("runners", [1, 2])
@pytest.mark.parametrize("fixed", [0.0, 0.001, 0.1])
def test_requests_that_gain_or_lose_nothing_run_together(fixed: float, runners: int):
    assert flooded(lambda bucket, rows: fixed + 0.001 * rows, runners=runners).mean_rows > 7.5


def test_what_is_faster_is_found_out_again_when_it_changes():
    calls = 0

    def service(bucket: object, rows: int) -> float:
        nonlocal calls
        calls += 1
        return 0.001 * rows * (1.0 if rows == 1 else 1.5) if calls < 300 else 0.001 + 0.0001 * rows

    outcome = flooded(service)
    sizes = [batch.rows for batch in outcome.batches]
    assert sum(sizes[100:300]) < 2 * 200
    assert sum(sizes[500:600]) > 7 * 100


def test_who_lets_requests_wait_for_others_gets_batches():
    assert flooded(lambda bucket, rows: 0.001 * rows * (1.0 if rows == 1 else 1.5), max_delay=0.01).mean_rows > 7.5


def test_one_slow_call_changes_nothing():
    gains = Gains()
    for _ in range(3):
        gains.record("a", 1, 1, 0.001)
        gains.record("a", 4, 4, 0.0035)
    gains.record("a", 4, 4, 3600.0)
    assert not gains.together("a")  # for now
    for _ in range(20):
        gains.record("a", 4, 4, 0.0035)
    assert gains.together("a")


def test_the_other_way_is_tried_now_and_then():
    gains = Gains()
    for _ in range(2):
        gains.record("a", 1, 1, 0.001)
        gains.record("a", 8, 8, 0.001)
    assert [gains.together("a") for _ in range(3 * (RETRY + 1))] == 3 * [*RETRY * [True], False]


def test_buckets_are_apart_and_only_the_last_ones_are_remembered():
    gains = Gains()
    for _ in range(2):
        gains.record("a", 1, 1, 0.001)
        gains.record("a", 2, 2, 0.1)
    assert not gains.together("a")
    assert gains.together("b")
    for index in range(MOST_BUCKETS):
        gains.record(index, 1, 1, 0.001)
    assert gains.together("a")
    assert len(gains._buckets) == MOST_BUCKETS
