"""A time limit passes when it should, however often it was set before, and begins few timers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest

from exportkit.serve.operations.deadline import Deadline


class Timer:
    def __init__(self, when: float, call: Callable[[], None]) -> None:
        self.when, self.call, self.cancelled = when, call, False

    def cancel(self) -> None:
        self.cancelled = True


class Loop:
    """A loop whose time passes when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[Timer] = []

    def time(self) -> float:
        return self.now

    def call_later(self, seconds: float, call: Callable[[], None]) -> Timer:
        self.timers.append(Timer(self.now + seconds, call))
        return self.timers[-1]

    @property
    def open(self) -> list[Timer]:
        return [timer for timer in self.timers if not timer.cancelled]

    def go_to(self, now: float) -> None:
        while due := [timer for timer in self.open if timer.when <= now]:
            first = min(due, key=lambda timer: timer.when)
            first.cancel()
            self.now = first.when
            first.call()
        self.now = now


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Loop:
    made = Loop()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: made)
    return made


def test_only_what_was_set_last_is_called_once_and_in_time(loop: Loop):
    draw, deadline = random.Random(0), Deadline()
    called: list[tuple[float, int]] = []
    due = None
    for number in range(2000):
        if due is not None and due <= loop.now:
            assert called == [(due, number - 1)]
        else:
            assert called == []
        called.clear()
        if draw.random() < 0.2:
            deadline.clear()
            due = None
        else:
            seconds = draw.choice((0.5, 1.0, 8.0))
            due = loop.now + seconds
            deadline.set(seconds, lambda number=number: called.append((loop.now, number)))
        loop.go_to(loop.now + draw.choice((0.125, 1.0, 16.0)))


def test_a_limit_that_is_set_again_and_again_begins_few_timers(loop: Loop):
    deadline = Deadline()
    for _ in range(1000):
        for seconds in (30, 60, 75):
            deadline.set(seconds, pytest.fail)
        loop.go_to(loop.now + 0.125)
    assert len(loop.timers) < 20
    assert len(loop.open) == 1


def test_after_the_end_nothing_is_called_and_no_timer_is_left(loop: Loop):
    deadline = Deadline()
    deadline.set(1, pytest.fail)
    deadline.close()
    assert loop.open == []
    loop.go_to(10)
