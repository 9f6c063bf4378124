"""Where cores are free, the next batch is prepared while a CPU's model runs, if it would not grow by waiting."""

from __future__ import annotations

import asyncio
import time

import pytest

from exportkit.serve.batching.tickets import BatchLimits
from exportkit.serve.engine import dispatcher
from tests.serve.engine import test_isolated_serving
from tests.serve.engine.asking import equal, only, request, serving, tensors
from tests.serve.engine.test_serving import answered, busy, call, run, until

HELD = 0.3  # seconds


@pytest.fixture(autouse=True)
def _eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "cores", lambda: 8.0)


def test_a_full_batch_is_prepared_and_its_wait_is_no_time_of_the_model(meeting_package):
    async def ask():
        async with serving(meeting_package, batch=BatchLimits(max_rows=4)) as repository:
            model = only(repository)
            inputs = [call(2) for _ in range(3)]
            async with busy(model):
                asked = [asyncio.ensure_future(model.infer(request(each))) for each in inputs]
                await until(lambda: model.counted.pending == 1)  # two are a batch, and the third begins the next
                assert model.counted.busy_runners == 1
                began = time.perf_counter()
                await asyncio.sleep(HELD)
                held = time.perf_counter() - began
            return inputs, await asyncio.gather(*asked), held

    inputs, answers, held = run(ask())
    assert all(equal(tensors(answer), answered(each)) for each, answer in zip(inputs, answers))
    assert [answer.timing.batch_rows for answer in answers] == [4, 4, 2]
    assert answers[0].timing.queue >= held
    assert answers[0].timing.compute_infer < held


def test_a_batch_that_could_grow_waits_for_the_runner(meeting_package):
    async def ask():
        async with serving(meeting_package, batch=BatchLimits(max_rows=8)) as repository:
            model = only(repository)
            async with busy(model):
                first = asyncio.ensure_future(model.infer(request(call(2))))
                await until(lambda: model.counted.pending == 1)
                await asyncio.sleep(0.1)
                assert model.counted.pending == 1
                second = asyncio.ensure_future(model.infer(request(call(3))))
                await until(lambda: model.counted.pending == 2)
            return [answer.timing.batch_rows for answer in await asyncio.gather(first, second)]

    assert run(ask()) == [5, 5]


def test_with_two_cores_nothing_is_prepared(meeting_package, monkeypatch):
    monkeypatch.setattr(dispatcher, "cores", lambda: 2.0)

    async def ask():
        async with serving(meeting_package, batch=BatchLimits(max_rows=1)) as repository:
            model = only(repository)
            async with busy(model):
                asked = [asyncio.ensure_future(model.infer(request(call()))) for _ in range(3)]
                await asyncio.sleep(0.1)
                assert model.counted.pending == 3
            await asyncio.gather(*asked)

    run(ask())


def test_of_requests_that_run_alone_one_is_prepared(meeting_package):
    async def ask():
        async with serving(meeting_package, batch=BatchLimits(max_rows=1)) as repository:
            model = only(repository)
            async with busy(model):
                asked = [asyncio.ensure_future(model.infer(request(call()))) for _ in range(3)]
                await until(lambda: model.counted.pending == 2)
                await asyncio.sleep(0.1)
                assert (model.counted.pending, model.counted.busy_runners) == (2, 1)
                asked[0].cancel()  # too late for the queue, and nobody is harmed
                asked[1].cancel()
                await until(lambda: model.counted.pending == 1)
            return await asyncio.gather(*asked, return_exceptions=True)

    first, second, third = run(ask())
    assert isinstance(first, asyncio.CancelledError)
    assert isinstance(second, asyncio.CancelledError)
    assert not isinstance(third, BaseException)


def test_a_crash_costs_no_other_request(misbehaving_package):
    test_isolated_serving.test_a_crash_costs_the_answer_of_the_request_that_crashes(misbehaving_package)
