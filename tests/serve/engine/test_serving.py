"""Requests wait, run together and are answered: each with its own answer, or with the reason why there is none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import torch

from exportkit.serve.batching.pending import BatchLimits
from exportkit.serve.engine.served import ServedModel
from exportkit.serve.engine.statistics import Statistics
from exportkit.serve.protocol.inference import InferTiming
from exportkit.serve.statuses import DeadlineError, NotReadyError, QueueFullError, TooLargeError
from tests.runtime import meeting
from tests.serve.engine.asking import equal, only, request, serving, serving_model, tensors, until

NAMES = ("doubled", "scores", "indices", "kept", "logits", "labels")
FAILS = -1.0  # as x's first element
WAITS = 2.0  # until another call meets it


def call(batch: int = 1, first: float = 0.0) -> dict[str, torch.Tensor]:
    x = torch.rand(batch, 8)
    x[0, 0] = first
    return {"x": x, "rows": torch.rand(batch, 8, 2)}


def answered(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return dict(zip(NAMES, meeting.answer(inputs["x"], inputs["rows"])))


def waiting_inside() -> int:
    return torch.ops.meeting.waiting.default()


@asynccontextmanager
async def busy(model: ServedModel) -> AsyncIterator[None]:
    """The model's only runner is in a call, until the block ends."""
    inputs = call(first=WAITS)
    running = asyncio.ensure_future(model.infer(request(inputs)))
    await until(lambda: waiting_inside() == 1)
    try:
        yield
    finally:
        await asyncio.to_thread(torch.ops.meeting.meet.default, torch.tensor([WAITS]))
        assert equal(tensors(await running), answered(inputs))


# --- together ---------------------------------------------------------------------------------------------------------


async def test_requests_of_many_tasks_run_together_and_each_gets_its_own_answer(meeting_package):
    async with serving_model(meeting_package) as model:
        inputs = [call() for _ in range(200)]
        answers = await asyncio.gather(*(model.infer(request(each, id=str(i))) for i, each in enumerate(inputs)))
        statistics, counted = model.statistics(), model.counted
    for index, (each, answer) in enumerate(zip(inputs, answers)):
        assert equal(tensors(answer), answered(each))
        assert (answer.model, answer.version, answer.id) == ("meeting", "1", str(index))
    assert statistics["inference_count"] == 200
    assert statistics["execution_count"] < 200
    assert statistics["inference_stats"]["success"]["count"] == 200
    assert statistics["inference_stats"]["queue"]["count"] == 200
    assert sum(each["batch_size"] * each["compute_infer"]["count"] for each in statistics["batch_stats"]) == 200
    assert sum(counted.request_seconds) == 200
    assert (counted.pending, counted.queued_rows, counted.queued_bytes, counted.busy_runners) == (0, 0, 0, 0)


async def test_two_runners_run_at_the_same_time(meeting_package):
    """Each call waits inside the operator for the other, so one runner alone would not end."""
    async with serving_model(meeting_package, runners=2, batch=BatchLimits(max_rows=1)) as model:
        await asyncio.gather(*(model.infer(request(call(first=WAITS))) for _ in range(2)))


async def test_priority_1_is_served_before_the_default(meeting_package):
    order = []

    async def one(model, name, **options):
        await model.infer(request(call(), **options))
        order.append(name)

    async with serving_model(meeting_package, batch=BatchLimits(max_rows=2)) as model:
        async with busy(model):
            asked = []
            for name, options in (("default", {}), ("second", {"priority": 2}), ("first", {"priority": 1})):
                for _ in range(2):
                    asked.append(asyncio.ensure_future(one(model, name, **options)))
            await until(lambda: model.counted.pending == 6)
        await asyncio.gather(*asked)
    assert order == ["first"] * 2 + ["default"] * 2 + ["second"] * 2


# --- failures ---------------------------------------------------------------------------------------------------------


async def test_a_cancelled_request_leaves_the_queue_and_the_others_are_answered(meeting_package):
    async with serving_model(meeting_package) as model:
        async with busy(model):
            gone = asyncio.ensure_future(model.infer(request(call(3))))
            inputs = call()
            stays = asyncio.ensure_future(model.infer(request(inputs)))
            await until(lambda: model.counted.queued_rows == 4)
            gone.cancel()
            await asyncio.wait([gone])
            assert gone.cancelled()
            assert (model.counted.pending, model.counted.queued_rows) == (1, 1)
        answer = await stays
    assert equal(tensors(answer), answered(inputs))
    assert (answer.timing.batch_rows, model.counted.failures["cancelled"].count) == (1, 1)


async def test_a_request_that_runs_is_not_stopped_when_its_client_goes(meeting_package):
    async with serving_model(meeting_package) as model:
        running = asyncio.ensure_future(model.infer(request(call(first=WAITS))))
        await until(lambda: waiting_inside() == 1)
        running.cancel()
        await asyncio.wait([running])
        assert waiting_inside() == 1
        await asyncio.to_thread(torch.ops.meeting.meet.default, torch.tensor([WAITS]))
        inputs = call()
        assert equal(tensors(await model.infer(request(inputs))), answered(inputs))
    counted = model.counted
    assert (counted.executions, counted.success.count, counted.failures["cancelled"].count) == (2, 1, 1)


async def test_a_late_request_is_told_while_the_runner_is_still_busy(meeting_package):
    """No runner is free to look at it, so a timer must."""
    async with serving_model(meeting_package) as model, busy(model):
        with pytest.raises(DeadlineError):
            await model.infer(request(call(), timeout=0.05))
        assert waiting_inside() == 1
        assert model.counted.pending == 0
    assert (model.counted.failures["deadline"].count, model.counted.executions) == (1, 1)


async def test_a_request_that_runs_too_long_is_told_in_time(meeting_package):
    async with serving_model(meeting_package) as model:
        with pytest.raises(DeadlineError):
            await model.infer(request(call(first=WAITS), timeout=0.2))
        assert waiting_inside() == 1
        await asyncio.to_thread(torch.ops.meeting.meet.default, torch.tensor([WAITS]))
        with pytest.raises(DeadlineError):
            await model.infer(request(call(), timeout=0.0))


# --- how much may wait ------------------------------------------------------------------------------------------------


async def test_a_full_queue_refuses(meeting_package):
    async with serving_model(meeting_package, batch=BatchLimits(max_queued_rows=3)) as model:
        async with busy(model):
            waiting = [asyncio.ensure_future(model.infer(request(call()))) for _ in range(3)]
            await until(lambda: model.counted.pending == 3)
            with pytest.raises(QueueFullError) as refusal:
                await model.infer(request(call()))
            with pytest.raises(QueueFullError, match="3 rows wait"), model.admit(10):
                pytest.fail("it was admitted")
        await asyncio.gather(*waiting)
        with model.admit(10):
            await model.infer(request(call()))
    assert (refusal.value.retry_after, model.counted.failures["full"].count) == (1, 2)


async def test_bodies_are_admitted_before_they_are_read(meeting_package):
    async with serving_model(meeting_package, batch=BatchLimits(max_queued_bytes=1000)) as model:
        assert model.max_body == 1000
        with model.admit(600):
            with pytest.raises(QueueFullError, match="600 bytes wait, and at most 1000 may"), model.admit(500):
                pytest.fail("it was admitted")
            with model.admit(400):
                pass
        with pytest.raises(TooLargeError, match="1001 bytes, and at most 1000 may wait"), model.admit(1001):
            pytest.fail("it was admitted")


# --- the end ----------------------------------------------------------------------------------------------------------


async def test_draining_answers_what_was_accepted_and_accepts_no_more(meeting_package):
    async with serving(meeting_package) as repository:
        model = only(repository)
        admitted = model.admit(100)
        admitted.__enter__()
        async with busy(model):
            inputs = [call() for _ in range(5)]
            waiting = [asyncio.ensure_future(model.infer(request(each))) for each in inputs]
            await until(lambda: model.counted.pending == 5)
            draining = asyncio.ensure_future(repository.drain())
            await asyncio.sleep(0)
            assert (repository.draining, repository.ready, model.ready) == (True, False, False)
            with pytest.raises(NotReadyError, match="the server drains"), model.admit(100):
                pytest.fail("it was admitted")
        answers = await asyncio.gather(*waiting)
        assert not draining.done()
        late = call()  # its body was admitted before
        assert equal(tensors(await model.infer(request(late))), answered(late))
        admitted.__exit__(None, None, None)
        await draining
        with pytest.raises(NotReadyError):
            await model.infer(request(call()))
    assert all(equal(tensors(answer), answered(each)) for each, answer in zip(inputs, answers))


# --- what is counted --------------------------------------------------------------------------------------------------


def test_durations_are_sums_in_nanoseconds():
    counted = Statistics()
    for seconds in (0.5, 1.5):
        counted.succeeded(InferTiming(0.25, 0.125, 0.0625, 0.03125, 3), seconds)
    counted.failed("full")
    counted.failed("deadline", 0.5)
    counted.executed(3, compute_input=0.125, compute_infer=0.0625, compute_output=0.03125)
    told = counted.to_json("m", "1")
    assert told["inference_stats"]["success"] == {"count": 2, "ns": 2_000_000_000}
    assert told["inference_stats"]["fail"] == {"count": 2, "ns": 500_000_000}
    assert told["inference_stats"]["queue"] == {"count": 2, "ns": 500_000_000}
    assert told["inference_stats"]["compute_infer"] == {"count": 2, "ns": 125_000_000}
    (batch,) = told["batch_stats"]
    assert (batch["batch_size"], batch["compute_input"]) == (3, {"count": 1, "ns": 125_000_000})
    assert (told["inference_count"], told["execution_count"]) == (3, 1)


def test_clients_cannot_make_the_list_of_batches_long():
    counted = Statistics()
    for rows in range(1, 5000):
        counted.executed(rows, compute_input=0, compute_infer=0, compute_output=0)
    assert len(counted.batches) == 256 + 5
    assert max(counted.batches) == 8192
    assert counted.rows == 5000 * 4999 // 2
