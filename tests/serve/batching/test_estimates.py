"""Expected times follow what was measured, and err towards too short where little is known."""

from __future__ import annotations

import pytest

from exportkit.serve.batching.batch_benefit import Estimates


def learnt(*times: float, rows: int = 4) -> Estimates:
    estimates = Estimates()
    for seconds in times:
        estimates.record("a", rows, seconds, 0.0)
    return estimates


def test_one_measurement_says_nothing_and_the_lower_of_two_is_believed():
    assert learnt(5.0).seconds("a", 4, 0.0) == 0.0
    assert learnt(5.0, 0.5).seconds("a", 4, 0.0) == 0.5
    assert learnt(0.5, 5.0).seconds("a", 4, 0.0) == 0.5


def test_the_mean_follows_a_model_that_became_slower_or_faster():
    assert learnt(*[0.1] * 3, *[0.4] * 20).seconds("a", 4, 0.0) == pytest.approx(0.4, rel=0.01)
    assert learnt(*[0.4] * 3, *[0.1] * 20).seconds("a", 4, 0.0) == pytest.approx(0.1, rel=0.02)


def test_one_outlier_does_not_double_the_mean():
    assert learnt(0.01, 0.01, 3600.0).seconds("a", 4, 0.0) < 0.02


@pytest.mark.parametrize(("rows", "expected"), [(1, 0.0), (2, 0.0), (3, 0.5), (4, 0.5), (5, 0.5), (64, 0.5)])
def test_a_batch_takes_at_least_as_long_as_a_smaller_one(rows: int, expected: float):
    assert learnt(0.5, 0.5, rows=4).seconds("a", rows, 0.0) == expected


@pytest.mark.parametrize(("seconds", "believed_until"), [(0.01, 1.0), (2.0, 20.0), (600.0, 60.0)])
def test_a_mean_is_forgotten_when_nothing_confirms_it(seconds: float, believed_until: float):
    estimates = learnt(seconds, seconds)
    assert estimates.seconds("a", 4, believed_until) == seconds
    assert estimates.seconds("a", 4, believed_until + 0.01) == 0.0
    estimates.record("a", 4, seconds, believed_until + 1)
    assert estimates.seconds("a", 4, believed_until + 1) == seconds


def test_only_the_shapes_that_ran_last_are_remembered():
    estimates = Estimates(most_shapes=3)
    for shape in ("a", "b", "c", "a", "d"):
        for _ in range(2):
            estimates.record(shape, 1, 1.0, 0.0)
    assert len(estimates) == 3
    assert [estimates.seconds(shape, 1, 0.0) for shape in "abcd"] == [1.0, 0.0, 1.0, 1.0]
