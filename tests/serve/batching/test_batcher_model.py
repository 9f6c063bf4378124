"""The batcher does what the naive queue does, whatever is asked of it in whatever order."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from exportkit.serve.batching.batcher import Batcher, BatcherFullError
from exportkit.serve.batching.pending import Batch, BatchLimits
from tests.serve.batching.naive_queue import NaiveQueue
from tests.serve.batching.simulated_runners import Numbered

TICK = 1 / 64  # seconds; sums of ticks are exact
TICKS = st.integers(0, 64).map(lambda count: count * TICK)


class Request(NamedTuple):
    shape: int
    rows: int
    size: int
    priority: int
    timeout: float | None


REQUESTS = st.builds(
    Request,
    shape=st.integers(0, 2),
    rows=st.integers(1, 9),
    size=st.integers(0, 100),
    priority=st.sampled_from([1, 2, 2, 7]),
    timeout=st.none() | st.integers(0, 200).map(lambda count: count * TICK),
)


class SameAsTheNaiveQueue(RuleBasedStateMachine):
    @initialize(
        max_rows=st.integers(1, 9),
        max_delay=st.sampled_from([0.0, 0.0, 4 * TICK, 40 * TICK]),
        max_queued_rows=st.integers(0, 60),
        max_queued_bytes=st.sampled_from([0, 300, 10_000]),
    )
    def start(self, max_rows: int, max_delay: float, max_queued_rows: int, max_queued_bytes: int) -> None:
        limits = BatchLimits(None, max_delay, max_queued_rows, max_queued_bytes)
        self.batcher: Batcher[Numbered] = Batcher(limits, max_rows)
        self.naive = NaiveQueue(limits, max_rows)
        self.now = 0.0
        self.submitted: list[Numbered] = []
        self.answered: list[Numbered] = []
        self.running: list[Batch[Numbered]] = []

    @rule(requests=st.lists(REQUESTS, min_size=1, max_size=6))
    def submit(self, requests: list[Request]) -> None:
        for request in requests:
            deadline = None if request.timeout is None else self.now + request.timeout
            priority, rows = request.priority, request.rows
            pending = Numbered(request.shape, rows, request.size, priority, deadline, self.now, len(self.submitted))
            if rows > self.naive.max_rows:
                with pytest.raises(ValueError, match=f"{rows} rows"):
                    self.batcher.submit(pending)
            elif not self.naive.has_room(pending):
                with pytest.raises(BatcherFullError, match="no room for"):
                    self.batcher.submit(pending)
            else:
                self.batcher.submit(pending)
                self.naive.submit(pending)
                self.submitted.append(pending)

    @rule()
    def take(self) -> None:
        batch = self.batcher.take(self.now)
        assert (list(batch.requests) if batch else []) == self.naive.take(self.now)
        if batch:
            assert batch.taken == self.now
            assert {pending.shape for pending in batch.requests} == {batch.shape}
            assert batch.rows <= self.naive.max_rows
            assert all(pending.deadline is None or self.now < pending.deadline for pending in batch.requests)
            self.running.append(batch)
            self.answer(list(batch.requests))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), seconds=TICKS)
    def finish(self, data: st.DataObject, seconds: float) -> None:
        self.finish_run(self.running.pop(data.draw(st.integers(0, len(self.running) - 1))), seconds)

    def finish_run(self, batch: Batch[Numbered], seconds: float) -> None:
        self.batcher.finished(batch, seconds)
        self.naive.measured.append((batch.shape, batch.rows, seconds, batch.taken + seconds))
        self.naive.runs.append((batch.shape, len(batch.requests), seconds, batch.rows))

    @rule(request=REQUESTS, count=st.integers(1, 4), times=st.integers(1, 40), together=TICKS, alone=TICKS)
    def run_alike(self, request: Request, count: int, times: int, together: float, alone: float) -> None:
        """So often that both ways are measured, and tried again."""
        for _ in range(times):
            self.submit([request] * count)
            self.take()
            if self.running:
                batch = self.running.pop()
                self.finish_run(batch, together if len(batch.requests) > 1 else alone)

    @rule()
    def late(self) -> None:
        late = self.batcher.late(self.now)
        must = [t for t in self.naive.waiting if t.deadline is not None and t.deadline <= self.now]
        may = [t for t in self.naive.waiting if self.naive.is_late(t, self.now)]
        assert set(must) | set(self.naive.found_late) <= set(late) <= set(may) | set(self.naive.found_late)
        self.naive.remove(late)
        self.answer(late)

    @precondition(lambda self: self.submitted)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        pending = data.draw(st.sampled_from(self.submitted))
        cancelled = self.batcher.cancel(pending)
        assert cancelled == (pending in self.naive.waiting or pending in self.naive.found_late)
        if cancelled:
            self.naive.remove([pending])
            self.answer([pending])

    @rule(ticks=TICKS)
    def wait(self, ticks: float) -> None:
        self.now += ticks

    @rule()
    def wait_for_the_next_event(self) -> None:
        event = self.batcher.next_event(self.now)
        waiting = self.naive.waiting
        assert event is None or event >= self.now
        nothing_before = math.inf if event is None else event
        # What is late is told by its deadline, and what was delayed may run when the delay ends.
        assert all(t.deadline is None or max(t.deadline, self.now) >= nothing_before for t in waiting)
        may_run_now = [pending for pending in waiting if self.naive.may_run(pending, self.now)]
        assert all(t in may_run_now or self.naive.delayed_until[t] >= nothing_before for t in waiting)
        assert not self.naive.found_late or event == self.now
        if event is not None:
            self.now = event

    def answer(self, requests: list[Numbered]) -> None:
        assert not set(requests) & set(self.answered)
        self.answered += requests

    @invariant()
    def counts_what_waits(self) -> None:
        if hasattr(self, "naive"):
            waiting = self.naive.waiting
            assert self.batcher.queued_rows == sum(pending.rows for pending in waiting)
            assert self.batcher.queued_bytes == sum(pending.size for pending in waiting)

    def teardown(self) -> None:
        if hasattr(self, "naive"):  # whatever is left can be taken or is late, and then everything was answered once
            self.now += self.naive.limits.max_delay
            while batch := self.batcher.take(self.now):
                self.answer(list(batch.requests))
            self.answer(self.batcher.late(self.now))
            assert set(self.answered) == set(self.submitted)
            assert self.batcher.next_event(self.now) is None


SameAsTheNaiveQueue.TestCase.settings = settings(max_examples=200, stateful_step_count=60, deadline=None, database=None)
TestSameAsTheNaiveQueue = SameAsTheNaiveQueue.TestCase
