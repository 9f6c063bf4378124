"""Requests run together where that is faster, and one by one where it is not, as measured times say."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exportkit.serve.batching.batch_benefit import LEAST_GAIN, TRIALS, WINDOW, BatchBenefit, Estimates
from exportkit.serve.batching.batcher import Batcher
from exportkit.serve.batching.pending import BatchLimits
from tests.drawn import examples
from tests.serve.batching.simulated_runners import Arrival, Outcome, simulate

FLOOD = [Arrival(index * 1e-4, "a") for index in range(4000)]  # ten thousand a second, which no runner below can answer


def flooded(service: Callable[[object, int], float], max_delay: float = 0.0, runners: int = 1) -> Outcome:
    limits = BatchLimits(max_queued_rows=10**9, max_delay=max_delay)
    outcome = simulate(Batcher(limits, 8), FLOOD, runners, service)
    assert sorted(ticket.index for batch in outcome.batches for ticket in batch.requests) == list(range(len(FLOOD)))
    return outcome


@pytest.mark.parametrize("runners", [1, 2])
def test_requests_that_gain_nothing_run_one_by_one(runners: int):
    """Bringing inputs together costs a tenth, and a batch is no faster a row."""
    outcome = flooded(lambda shape, rows: 0.001 * rows * (1.0 if rows == 1 else 1.1), runners=runners)
    assert outcome.mean_rows < 1.5
    assert outcome.idle_while_waiting == 0


@pytest.mark.parametrize("runners", [1, 2])
@pytest.mark.parametrize("fixed", [0.0, 0.001, 0.1])
def test_requests_that_gain_or_lose_nothing_run_together(fixed: float, runners: int):
    sizes = [batch.rows for batch in flooded(lambda shape, rows: fixed + 0.001 * rows, runners=runners).batches]
    assert sizes.count(8) * 8 > 0.95 * len(FLOOD)


def test_who_lets_requests_wait_for_others_gets_batches():
    assert flooded(lambda shape, rows: 0.001 * rows * (1.0 if rows == 1 else 1.5), max_delay=0.01).mean_rows > 7.5


def saturated(gains: BatchBenefit, seconds: Callable[[int, int], float], runs: int) -> tuple[float, list[int]]:
    """Always lets 8 requests wait. `seconds` gets a batch's rows, and how many batches ran since their number changed.

    Returns the rows that ran a second, and the rows of each batch.
    """
    ran: list[int] = []
    spent, since = 0.0, 0
    for _ in range(runs):
        rows = 8 if gains.decide_together("a") else 1
        since = since + 1 if ran and ran[-1] == rows else 0
        took = seconds(rows, since)
        gains.record("a", rows, rows, took)
        spent += took
        ran.append(rows)
    return sum(ran) / spent, ran


@settings(max_examples=examples(30))
@given(st.floats(1e-5, 10.0), st.floats(1e-5, 10.0))
def test_trials_cost_little_however_slow_the_other_way_is(alone: float, together: float):
    rate, _ = saturated(BatchBenefit(), lambda rows, since: alone if rows == 1 else together, 20_000)
    learning = WINDOW * together + 19 * alone + 19 * max(alone, together)
    work = 20_000 * min(alone, together)
    assert rate >= max(1 / alone, 8 / together) * (1 - LEAST_GAIN) / (1 + TRIALS + learning / work)


def test_what_is_faster_is_found_out_again_when_it_changes():
    gains = BatchBenefit()
    _, ran = saturated(gains, lambda rows, since: 0.001 * rows * (1.0 if rows == 1 else 1.5), 5000)
    assert ran.count(8) < 50
    _, ran = saturated(gains, lambda rows, since: 0.001 + 0.0001 * rows, 5000)
    assert ran[4000:].count(1) < 50


# --- how long a batch takes: too short where little is known ---------------------------------------------------------


def learnt(*times: float) -> Estimates:
    estimates = Estimates()
    for seconds in times:
        estimates.record("a", 4, seconds, 0.0)
    return estimates


def test_the_mean_follows_a_model_that_became_slower_or_faster_and_no_outlier():
    assert learnt(*[0.1] * 3, *[0.4] * 20).seconds("a", 4, 0.0) == pytest.approx(0.4, rel=0.01)
    assert learnt(*[0.4] * 3, *[0.1] * 20).seconds("a", 4, 0.0) == pytest.approx(0.1, rel=0.02)
    assert learnt(0.01, 0.01, 3600.0).seconds("a", 4, 0.0) < 0.02


def test_of_two_measurements_the_lower_is_believed_for_as_many_rows_and_more():
    for times in ((5.0, 0.5), (0.5, 5.0)):
        assert [learnt(*times).seconds("a", rows, 0.0) for rows in (2, 3, 4, 5, 64)] == [0.0, 0.5, 0.5, 0.5, 0.5]
    assert learnt(5.0).seconds("a", 4, 0.0) == 0.0
