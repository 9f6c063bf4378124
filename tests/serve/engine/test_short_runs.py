"""Short runs happen in threads without Python, by the rules and with the answers of all others."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
import torch

from exportkit.runtime.background import Background
from exportkit.serve.batching.tickets import BatchLimits
from exportkit.serve.engine import dispatcher
from exportkit.serve.engine.model_copy import ModelCopy
from exportkit.serve.statuses import BackendError
from tests.serve.engine.asking import equal, play, request, tensors
from tests.serve.engine.test_serving import FAILS, WAITS, answered, call, until, waiting_inside


@pytest.fixture(autouse=True)
def _none_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "QUICK_SECONDS", 0)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many runs happened in each way."""
    found = {"with Python": 0, "without": 0}

    def counting(kind: type, name: str, way: str) -> None:
        original = getattr(kind, name)

        def counted(*arguments: Any) -> Any:
            found[way] += 1
            return original(*arguments)

        monkeypatch.setattr(kind, name, counted)

    counting(ModelCopy, "run_requests", "with Python")
    counting(Background, "begin", "without")
    return found


async def ask(model: Any, *inputs: dict[str, torch.Tensor]) -> list[Any]:
    return await asyncio.gather(*(model.infer(request(each)) for each in inputs), return_exceptions=True)


def test_after_the_first_they_need_no_thread_of_pythons(meeting_package, ran, monkeypatch):
    monkeypatch.setattr(dispatcher, "SLOW_SECONDS", 10)

    async def scenario(model: Any) -> None:
        await ask(model, call())
        ran.update({"with Python": 0, "without": 0})
        inputs = [call(rows) for rows in (1, 3, 2) * 20]
        answers = await ask(model, *inputs)
        assert all(equal(tensors(answer), answered(each)) for each, answer in zip(inputs, answers))
        assert ran["with Python"] == 0 < ran["without"] < 60
        counted = model.counted
        assert (counted.success.count, counted.rows, counted.executions) == (61, 121, 1 + ran["without"])
        assert (counted.pending, counted.queued_rows, counted.queued_bytes, counted.busy_runners) == (0, 0, 0, 0)

    play(meeting_package, scenario, batch=BatchLimits(max_rows=8))


def test_of_a_batch_that_fails_only_the_bad_request_does(meeting_package, monkeypatch):
    monkeypatch.setattr(dispatcher, "SLOW_SECONDS", 10)

    async def scenario(model: Any) -> None:
        await ask(model, call())
        inputs = [call(1, FAILS), call(2), call(3)]
        bad, first, last = await ask(model, *inputs)
        assert isinstance(bad, BackendError)
        assert "the compiled model failed" in bad.message
        assert equal(tensors(first), answered(inputs[1]))
        assert equal(tensors(last), answered(inputs[2]))
        assert (model.counted.busy_runners, model.counted.failures["backend"].count) == (0, 1)

    play(meeting_package, scenario, batch=BatchLimits(max_delay=0.05))


def test_after_a_slow_run_runners_take_what_waits(meeting_package, ran, monkeypatch):
    monkeypatch.setattr(dispatcher, "CALM_SECONDS", 1e6)

    async def scenario(model: Any) -> None:
        model._dispatchers[0]._calm = 0.0
        slow = asyncio.ensure_future(model.infer(request(call(first=WAITS))))
        await until(lambda: waiting_inside() == 1)
        assert ran["without"] == 1
        ran["with Python"] = 0
        inputs = [call() for _ in range(5)]
        waiting = asyncio.ensure_future(ask(model, *inputs))
        await asyncio.sleep(0.1)
        await asyncio.to_thread(torch.ops.meeting.meet.default, torch.tensor([WAITS]))
        await slow
        assert all(equal(tensors(answer), answered(each)) for each, answer in zip(inputs, await waiting))
        assert (ran["without"], ran["with Python"] > 0) == (1, True)

    play(meeting_package, scenario)


def test_after_a_large_request_runners_take_what_waits(meeting_package, ran, monkeypatch):
    monkeypatch.setattr(dispatcher, "SLOW_SECONDS", 10)

    async def scenario(model: Any) -> None:
        await ask(model, call())
        monkeypatch.setattr(dispatcher, "LARGE_BYTES", sum(tensor.nbytes for tensor in call(2).values()) - 1)
        for rows, calm, way in ((1, 10, "without"), (2, 1e6, "with Python"), (1, 10, "with Python")):
            monkeypatch.setattr(dispatcher, "CALM_SECONDS", calm)
            ran.update({"with Python": 0, "without": 0})
            inputs = call(rows)
            (answer,) = await ask(model, inputs)
            assert equal(tensors(answer), answered(inputs))
            assert [each for each, count in ran.items() if count] == [way]

    play(meeting_package, scenario)


def test_no_more_than_a_few_quick_batches_leave_the_queue_early(meeting_package, monkeypatch):
    monkeypatch.setattr(dispatcher, "SLOW_SECONDS", 10)

    async def pending(model: Any, inputs: list[dict[str, torch.Tensor]]) -> int:
        slow = asyncio.ensure_future(model.infer(request(call(first=WAITS))))
        await until(lambda: waiting_inside() == 1)
        waiting = asyncio.ensure_future(ask(model, *inputs))
        await asyncio.sleep(0.05)
        left = model.counted.pending
        assert model.counted.busy_runners == 1
        await asyncio.to_thread(torch.ops.meeting.meet.default, torch.tensor([WAITS]))
        assert equal(tensors((await waiting)[-1]), answered(inputs[-1]))
        await slow
        return left

    async def scenario(model: Any) -> None:
        for _ in range(5):
            await ask(model, call())
        monkeypatch.setattr(dispatcher, "WAITING_SECONDS", 10)
        assert await pending(model, [call() for _ in range(5)]) == 5 - dispatcher.WAITING_BATCHES
        monkeypatch.setattr(dispatcher, "WAITING_SECONDS", 1e-9)
        assert await pending(model, [call() for _ in range(5)]) == 5

    play(meeting_package, scenario, batch=BatchLimits(max_rows=1))


def test_a_model_closes_after_a_run_that_nobody_waits_for(meeting_package, monkeypatch):
    async def scenario(model: Any) -> None:
        model._dispatchers[0]._calm = 0.0
        asked = asyncio.ensure_future(model.infer(request(call(first=WAITS))))
        await until(lambda: waiting_inside() == 1)
        asked.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asked
        closing = asyncio.ensure_future(model.close())
        await asyncio.sleep(0.1)
        assert not closing.done()
        await asyncio.to_thread(torch.ops.meeting.meet.default, torch.tensor([WAITS]))
        await closing
        await asyncio.sleep(0)
        assert model.counted.busy_runners == 0

    play(meeting_package, scenario)


def test_torchs_own_binding_answers_too(meeting_package, ran, monkeypatch):
    monkeypatch.setenv("EXPORTKIT_RUNTIME", "python")

    async def scenario(model: Any) -> None:
        inputs = [call() for _ in range(4)]
        assert all(equal(tensors(answer), answered(each)) for each, answer in zip(inputs, await ask(model, *inputs)))
        assert ran["without"] == 0

    play(meeting_package, scenario)
