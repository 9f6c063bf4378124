"""Runs that are shorter than to wake a thread happen in the event loop's, and no others do."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from exportkit.runtime.background import Background
from exportkit.serve.batching.tickets import BatchLimits
from exportkit.serve.engine import dispatcher
from exportkit.serve.engine.model_copy import ModelCopy
from tests.serve.engine.asking import play, request
from tests.serve.engine.rows import example

KNOWN = 2  # runs after which it is known how long one takes


@pytest.fixture
def ran_here(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each run, whether it happened in the event loop's thread. It is quick however long a busy machine takes."""
    found: list[bool] = []
    run_requests = ModelCopy.run_requests

    def noted(copy: ModelCopy, *arguments: Any) -> Any:
        found.append(threading.current_thread() is threading.main_thread())
        return run_requests(copy, *arguments)

    begin = Background.begin

    def begun(background: Background, *arguments: Any) -> Any:
        found.append(False)
        return begin(background, *arguments)

    monkeypatch.setattr(ModelCopy, "run_requests", noted)
    monkeypatch.setattr(Background, "begin", begun)
    monkeypatch.setattr(dispatcher, "QUICK_SECONDS", 10)
    monkeypatch.setattr(dispatcher, "SLOW_SECONDS", 10)
    return found


def test_a_run_that_is_known_to_be_quick_needs_no_thread(rows_package: Path, ran_here: list[bool]):
    async def scenario(model: Any) -> None:
        ran_here.clear()
        inputs = example(2)
        answers = [await model.infer(request(inputs)) for _ in range(KNOWN + 3)]
        assert ran_here == [False] * KNOWN + [True] * 3
        assert len({bytes(answer.outputs[0].data) for answer in answers}) == 1
        assert (model.counted.success.count, model.counted.rows) == (KNOWN + 3, 2 * (KNOWN + 3))
        assert (model.counted.pending, model.counted.busy_runners) == (0, 0)
        await model.infer(request(example(1)))  # of which nothing is known: a smaller batch may take as long
        assert not ran_here[-1]

    play(rows_package, scenario)


def test_after_a_slow_run_none_happens_in_the_loop(
    rows_package: Path, ran_here: list[bool], monkeypatch: pytest.MonkeyPatch
):
    async def scenario(model: Any) -> None:
        for _ in range(KNOWN):
            await model.infer(request(example(2)))
        noted = ModelCopy.run_requests

        def slow(copy: ModelCopy, *arguments: Any) -> Any:
            time.sleep(0.05)
            return noted(copy, *arguments)

        monkeypatch.setattr(ModelCopy, "run_requests", slow)
        monkeypatch.setattr(dispatcher, "SLOW_SECONDS", 0.02)
        await model.infer(request(example(2)))
        monkeypatch.setattr(ModelCopy, "run_requests", noted)
        assert ran_here[-1]
        for _ in range(4):
            await model.infer(request(example(2)))
        assert ran_here[-4:] == [False] * 4

    play(rows_package, scenario)


def test_requests_that_are_to_wait_for_others_do(rows_package: Path, ran_here: list[bool]):
    async def scenario(model: Any) -> None:
        ran_here.clear()
        for _ in range(4):
            await model.infer(request(example(2)))
        assert ran_here == [False] * 4

    play(rows_package, scenario, batch=BatchLimits(max_delay=0.001))


def test_no_request_overtakes_those_that_wait(rows_package: Path, ran_here: list[bool]):
    async def scenario(model: Any) -> None:
        for _ in range(KNOWN):
            await model.infer(request(example(2)))
        ran_here.clear()
        with model._copies[0].slot(exclusive=True):  # a runner waits for it
            model._dispatchers[0]._calm = time.monotonic() + 0.02
            waiting = asyncio.ensure_future(model.infer(request(example(2))))
            await asyncio.sleep(0.05)
            others = [asyncio.ensure_future(model.infer(request(example(2)))) for _ in range(3)]
            await asyncio.sleep(0)
            assert not any(each.done() for each in [waiting, *others])
        await asyncio.gather(waiting, *others)
        assert not any(ran_here)

    play(rows_package, scenario)
