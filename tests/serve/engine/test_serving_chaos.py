"""Whatever clients do and however often the model is exchanged, each request gets its own answer or one reason."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter

import pytest

from exportkit.serve.batching.pending import BatchLimits
from exportkit.serve.statuses import BackendError, BadRequestError, DeadlineError, QueueFullError, ServeError
from tests.serve.engine.asking import equal, request, serving, tensors
from tests.serve.engine.test_serving import FAILS, answered, call

REQUESTS = 300


async def one(repository, draw: random.Random) -> str:
    """Asks in one way or another, checks what comes, and returns what was counted for it."""
    kind = draw.choice(("plain", "plain", "plain", "fails", "refused", "hasty", "fickle"))
    inputs = call(draw.randint(1, 6), first=FAILS if kind == "fails" else 0.0)
    if kind == "refused":
        inputs["rows"] = inputs["rows"][:, :7]
    timeout = draw.uniform(0, 0.01) if kind == "hasty" else None
    await asyncio.sleep(draw.uniform(0, 0.3))
    model = repository.model("meeting")
    asked = asyncio.ensure_future(model.infer(request(inputs, timeout=timeout, priority=draw.randint(0, 3))))
    if kind == "fickle":
        await asyncio.sleep(draw.choice((0, 0.005)) * draw.random())
        asked.cancel()
    try:
        answer = await asked
    except asyncio.CancelledError:
        assert kind == "fickle"
        return "cancelled"
    except ServeError as error:
        # A request that fails on its own does so in a batch too, unless it is not the first there.
        allowed = {"fails": BackendError, "refused": BadRequestError, "hasty": DeadlineError}.get(kind, QueueFullError)
        if not isinstance(error, (allowed, QueueFullError)):
            raise
        return error.reason
    assert kind != "refused"
    assert equal(tensors(answer), answered(inputs))
    return "success"


@pytest.mark.parametrize("runners", [1, 3])
async def test_nothing_is_lost_and_nothing_is_answered_twice(meeting_package, runners, tmp_path):
    draw = random.Random(runners)
    package = tmp_path / "meeting.pt2"
    package.write_bytes(meeting_package.read_bytes())
    limits = BatchLimits(max_rows=16, max_queued_rows=64, max_delay=0.001 * (runners - 1))
    async with serving(package, runners=runners, batch=limits) as repository:
        asked = [asyncio.ensure_future(one(repository, draw)) for _ in range(REQUESTS)]
        for exchange in range(3):
            os.utime(package, (exchange, exchange))
            await repository.load("meeting", {})
        outcomes = Counter(await asyncio.gather(*asked))
        counted = repository.model("meeting").counted
    assert outcomes.pop("success") == counted.success.count == sum(counted.request_seconds)
    assert outcomes == {reason: spent.count for reason, spent in counted.failures.items()}
    assert {"backend", "invalid", "cancelled"} <= outcomes.keys()
    assert (counted.pending, counted.queued_rows, counted.queued_bytes, counted.busy_runners) == (0, 0, 0, 0)
