"""The same requests by our rule and by Triton's, whose batch ends where a request of another shape comes."""

from __future__ import annotations

import pytest

from tests.serve.batching.simulated_runners import Arrival
from tests.serve.batching.traces import alternating, by_both_rules, mixed, one_shape, waits


@pytest.mark.parametrize("runners", [1, 2])
def test_two_shapes_that_alternate_run_in_much_larger_batches_than_by_tritons_rule(runners: int):
    """They come twice as fast as the runners answer single requests."""
    ours, theirs = by_both_rules(alternating(400 * runners, 1000), runners)
    assert theirs.mean_rows == 1.0
    assert ours.mean_rows >= 1.8
    assert waits(ours)[-1] < waits(theirs)[-1]


def test_a_mixture_of_shapes_and_rows_waits_far_less_than_by_tritons_rule():
    trace = mixed(600, 3000)
    ours, theirs = by_both_rules(trace, 2)
    assert ours.mean_rows >= 1.5 * theirs.mean_rows
    assert waits(ours)[len(trace) // 2] < waits(theirs)[len(trace) // 2] / 10
    assert waits(ours)[-1] < waits(theirs)[-1]


@pytest.mark.parametrize("trace", [one_shape(500, 2000), mixed(200, 2000)], ids=["one shape", "little to do"])
def test_batches_are_at_least_as_large_where_tritons_rule_has_no_weakness(trace: list[Arrival]):
    ours, theirs = by_both_rules(trace, 1)
    assert ours.mean_rows >= theirs.mean_rows
