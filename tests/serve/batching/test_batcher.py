"""What the batcher promises, under simulated runners on a virtual clock."""

from __future__ import annotations

import gc
import random
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exportkit.serve.batching.batcher import MOST_PASSED_OVER, Batcher, Schedule
from exportkit.serve.batching.pending import Batch, BatchLimits
from tests.drawn import examples
from tests.serve.batching.simulated_runners import Arrival, Numbered, Outcome, simulate

TICK = 1 / 64  # seconds; sums of ticks are exact
MANY = settings(deadline=None, database=None, max_examples=examples(100))


def ticks(least: int, most: int) -> st.SearchStrategy[float]:
    return st.integers(least, most).map(lambda count: count * TICK)


PRIORITIES = st.integers(1, 4)
ROWS, BYTES = st.integers(1, 40) | st.just(500), st.integers(1, 300) | st.just(3000)  # the last have room for all
TIMEOUTS = st.none() | ticks(1, 100)
CANCELLED_AFTER = st.none() | ticks(0, 30)


def arrivals(
    priorities: st.SearchStrategy[int] = PRIORITIES,
    timeouts: st.SearchStrategy[float | None] = TIMEOUTS,
    cancelled_after: st.SearchStrategy[float | None] = CANCELLED_AFTER,
) -> st.SearchStrategy[list[Arrival]]:
    one = st.builds(
        Arrival,
        time=ticks(0, 100),
        shape=st.integers(0, 3),
        rows=st.integers(1, 8),
        size=st.integers(0, 50),
        priority=priorities,
        timeout=timeouts,
        cancelled_after=cancelled_after,
    )
    return st.integers(0, 60).flatmap(lambda count: st.lists(one, min_size=count, max_size=count))


def service(shape: object, rows: int) -> float:
    """A shape and every row add to the time, so that the first guess is wrong and estimates matter."""
    return (4 + 3 * hash(shape) + rows) * TICK


def batcher(rows: int = 8, **limits: float) -> Batcher[Numbered]:
    return Batcher(BatchLimits(**limits), rows)


def pending(index: int = 0, shape: object = "a", rows: int = 1, **changes: object) -> Numbered:
    fields = {"size": 1, "priority": 2, "deadline": None, "arrived": 0.0} | changes
    return Numbered(shape=shape, rows=rows, index=index, **fields)


def batches_until(outcome: Outcome) -> dict[int, int]:
    """How many batches were taken from a request's arrival to its own, that one included."""
    own = {t.index: index for index, batch in enumerate(outcome.batches) for t in batch.requests}
    return {payload: index + 1 - outcome.batches_before[payload] for payload, index in own.items()}


@MANY
@given(arrivals(), st.integers(1, 3), st.sampled_from([0.0, 3 * TICK]), ROWS, BYTES)
def test_every_accepted_request_gets_one_answer_and_nothing_is_exceeded(
    trace: list[Arrival], runners: int, max_delay: float, rows: int, size: int
):
    queue = batcher(max_delay=max_delay, max_queued_rows=rows, max_queued_bytes=size)
    submit = queue.submit

    def submit_and_count(waiting: Numbered) -> None:
        empty = queue.queued_rows == 0
        submit(waiting)
        assert empty or (queue.queued_rows <= rows and queue.queued_bytes <= size)

    queue.submit = submit_and_count
    outcome = simulate(queue, trace, runners, service)
    answered = [t for batch in outcome.batches for t in batch.requests]
    answered += [t for _, t in outcome.late] + outcome.cancelled
    assert sorted(t.index for t in answered) == sorted(t.index for t in outcome.accepted)
    assert len(outcome.accepted) + len(outcome.refused) == len(trace)
    assert all(batch.rows <= 8 and {t.shape for t in batch.requests} == {batch.shape} for batch in outcome.batches)
    assert queue.queued_rows == queue.queued_bytes == 0
    # Nothing runs past its deadline, and who is late is told by then.
    for batch in outcome.batches:
        assert all(t.deadline is None or batch.taken < t.deadline for t in batch.requests)
    assert all(t.deadline is not None and now <= t.deadline for now, t in outcome.late)
    # No runner is free while a request waits.
    assert outcome.idle_while_waiting == 0 or max_delay


@MANY
@given(arrivals(priorities=st.just(2), cancelled_after=st.none()), st.integers(1, 3))
def test_a_request_waits_for_no_more_batches_than_requests_came_before_it(trace: list[Arrival], runners: int):
    outcome = simulate(batcher(), trace, runners, service)
    waits = batches_until(outcome)
    for t in (t for batch in outcome.batches for t in batch.requests):
        before = [o for o in outcome.accepted if outcome.accepted.index(o) < outcome.accepted.index(t)]
        assert waits[t.index] <= len(before) + 1


@MANY
@given(arrivals(timeouts=st.none(), cancelled_after=st.none()), st.integers(1, 3))
def test_a_low_priority_waits_not_for_ever_and_no_equal_is_overtaken_but_to_fit(trace: list[Arrival], runners: int):
    outcome = simulate(batcher(), trace, runners, service)
    waits = batches_until(outcome)
    for index, t in enumerate(outcome.accepted):
        assert waits[t.index] <= (MOST_PASSED_OVER + 1) * (index + 1)
    number = {t: index for index, t in enumerate(outcome.accepted)}
    taken = {t: index for index, batch in enumerate(outcome.batches) for t in batch.requests}
    for t in outcome.accepted:
        for other in outcome.accepted:
            alike = (t.shape, t.priority) == (other.shape, other.priority)
            if alike and number[t] < number[other] and taken[t] > taken[other]:
                batch = outcome.batches[taken[other]]
                before = sum(o.rows for o in batch.requests if (o.priority, number[o]) < (t.priority, number[t]))
                # A request of another priority may begin the batch, when it has waited longest.
                first = 0 if batch.requests[0].priority <= t.priority else batch.requests[0].rows
                assert before + first + t.rows > 8


def test_requests_of_two_shapes_that_alternate_run_together_by_shape():
    queue = batcher()
    for index in range(16):
        queue.submit(pending(index, "ab"[index % 2]))
    taken = [queue.take(0.0), queue.take(0.0), queue.take(0.0)]
    assert [batch and [t.index for t in batch.requests] for batch in taken] == [
        list(range(0, 16, 2)),
        list(range(1, 16, 2)),
        None,
    ]


def test_one_batch_in_nine_begins_with_the_request_that_waited_longest():
    queue = batcher(1)
    queue.submit(pending(1000, "low", priority=9))
    order = []
    for index in range(2 * MOST_PASSED_OVER + 2):
        queue.submit(pending(index, "high", priority=1))
        batch = queue.take(0.0)
        assert batch is not None
        order.append(batch.requests[0].index)
    assert order == [*range(MOST_PASSED_OVER), 1000, *range(MOST_PASSED_OVER, 2 * MOST_PASSED_OVER + 1)]


def test_what_is_delayed_still_waits_when_others_passed_over_it():
    queue = batcher(2, max_delay=10.0)
    queue.submit(pending(0, "low", priority=9))
    for _ in range(2 * MOST_PASSED_OVER + 2):
        queue.submit(pending(1, "high"))
        queue.submit(pending(2, "high"))
        batch = queue.take(0.0)
        assert batch is not None
        assert batch.shape == "high"


@pytest.mark.parametrize(("misfits", "taken"), [(8, [5, 3]), (9, [5])])
def test_younger_requests_pass_over_as_many_that_do_not_fit_as_a_batch_has_rows(misfits: int, taken: list[int]):
    queue = batcher()
    for rows in (5, *[6] * misfits, 3):
        queue.submit(pending(rows=rows))
    batch = queue.take(0.0)
    assert batch is not None
    assert [t.rows for t in batch.requests] == taken


def test_a_schedule_has_the_first_of_those_that_wait_whoever_left():
    chance, waiting = random.Random(0), dict[int, float]()
    schedule = Schedule(waiting)
    for number in range(1000):
        waiting[number] = chance.random()
        schedule.push(waiting[number], number)
        if number % 10:
            del waiting[chance.choice(list(waiting))]
        assert schedule.first() == min(((key, each) for each, key in waiting.items()), default=None)
    assert len(schedule) < 1000


def test_a_delay_ends_with_a_full_batch_or_half_of_what_a_deadline_leaves():
    queue = batcher(max_delay=1.0)
    queue.submit(pending(0))
    assert queue.take(0.5) is None
    assert queue.next_event(0.5) == 1.0
    queue.submit(pending(1, deadline=1.0, arrived=0.5))
    assert queue.take(0.5) is None
    assert queue.next_event(0.5) == 0.75
    batch = queue.take(0.75)
    assert batch is not None
    assert [t.index for t in batch.requests] == [0, 1]
    for index in range(8):
        assert queue.take(0.75) is None
        queue.submit(pending(index, arrived=0.75))
    assert queue.take(0.75) is not None


def test_a_batch_stays_so_small_that_it_is_ready_by_the_deadlines_of_its_requests():
    queue = batcher()
    for rows in (1, 1, 2, 2, 4, 4, 8, 8):  # a tenth of a second a row
        batch = Batch("a", (pending(rows=rows),), 0.0)
        queue.finished(batch, rows / 10)
    queue.submit(pending(0, deadline=0.45, arrived=0.1))
    for index in range(1, 8):
        queue.submit(pending(index, arrived=0.1))
    batch = queue.take(0.1)
    assert batch is not None
    assert batch.rows == 2  # four would be ready at 0.5
    batch = queue.take(0.1)
    assert batch is not None
    assert batch.rows == 6


def test_a_request_that_was_found_late_may_be_cancelled_and_is_told_to_nobody():
    queue, late = batcher(), pending(0, deadline=0.5)
    queue.submit(late)
    assert queue.take(0.5) is None
    assert queue.next_event(0.5) == 0.5
    assert [queue.cancel(late), queue.cancel(late)] == [True, False]
    assert queue.late(0.5) == []


def test_an_estimate_that_is_wrong_drops_requests_only_until_it_is_old():
    """Two runs take a minute, by a fault. The next ones would take a hundredth of a second."""
    queue = batcher()
    for _ in range(2):
        queue.finished(Batch("a", (pending(),), 0.0), 60.0)
    trace = [Arrival(60 + float(second), "a", timeout=1.0) for second in range(1000)]
    outcome = simulate(queue, trace, 1, lambda shape, rows: 0.01)
    answered = [t.index for batch in outcome.batches for t in batch.requests]
    assert outcome.late[0][1].index == 0
    assert answered == list(range(answered[0], 1000))
    assert answered[0] <= 61


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": 9}, "the request has 9 rows, and a batch has 1 to 8"),
        ({"rows": 0}, "the request has 0 rows"),
        ({"deadline": float("nan")}, "deadline is not a number"),
    ],
)
def test_a_request_that_no_batch_can_have_is_refused_and_leaves_nothing(changes: dict[str, object], message: str):
    queue = batcher()
    with pytest.raises(ValueError, match=message):
        queue.submit(pending(**changes))
    assert queue.queued_rows == 0
    assert queue.take(0.0) is None


@pytest.mark.parametrize("end", ["take", "cancel", "late"])
def test_nothing_of_a_request_is_kept_after_it_left(end: str):
    queue = batcher(max_delay=0.5)
    gone = []
    for index in range(2000):
        now = float(index)
        waiting = pending(index, ("shape", index), priority=index, deadline=now + 1000, arrived=now)
        gone.append(weakref.ref(waiting))
        queue.submit(waiting)
        if end == "cancel":
            assert queue.cancel(waiting)
        elif end == "take":
            batch = queue.take(now + 0.5)
            assert batch is not None
            queue.finished(batch, 0.1)
            del batch
        else:
            assert queue.late(now + 1000) == [waiting]
        del waiting
    gc.collect()
    assert [ref for ref in gone if ref() is not None] == []
    assert sum(len(part) for part in vars(queue).values() if hasattr(part, "__len__")) < 1000
