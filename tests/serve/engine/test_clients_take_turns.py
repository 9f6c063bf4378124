"""Clients who share a model: a flood of one delays another by what runs, and leaves it room."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from exportkit.serve.batching.batcher import Batcher
from exportkit.serve.batching.tickets import BatchLimits
from exportkit.serve.engine.dispatcher import Dispatcher
from exportkit.serve.protocol.inference import InferRequest
from exportkit.serve.statuses import QueueFullError
from tests.serve.engine.asking import only, request, serving
from tests.serve.engine.rows import example


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 120))


def asked(client: str) -> InferRequest:
    return replace(request(example(1)), client=client)


def test_who_asks_once_waits_for_one_of_a_flood_at_most(rows_package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    before: list[int] = []  # so many ran before one was submitted
    take, submit = Batcher.take, Batcher.submit

    def noted(batcher, now, **options):
        batch = take(batcher, now, **options)
        taken.extend(ticket.client for ticket in (batch.tickets if batch else ()))
        return batch

    def counted(batcher, ticket):
        submit(batcher, ticket)
        before.append(len(taken))

    async def ask() -> None:
        async with serving(rows_package, devices=("cpu",), batch=BatchLimits(max_rows=1)) as repository:
            model = only(repository)
            flood = [asyncio.ensure_future(model.infer(asked("flood"))) for _ in range(200)]
            await asyncio.sleep(0)  # all of it waits or runs now
            await model.infer(asked("other"))
            await asyncio.gather(*flood)

    monkeypatch.setattr(Dispatcher, "run_quick", lambda dispatcher, request: None)  # everything waits
    monkeypatch.setattr(Batcher, "take", noted)
    monkeypatch.setattr(Batcher, "submit", counted)
    run(ask())
    assert len(taken) == 201
    assert taken.index("other") - before[-1] in (0, 1)  # which may have come when nothing else waited


def test_a_flood_leaves_room_for_bodies(rows_package: Path) -> None:
    async def ask() -> None:
        async with serving(rows_package, batch=BatchLimits(max_queued_bytes=1000)) as repository:
            model = only(repository)
            with model.admit(500, "flood"):
                with pytest.raises(QueueFullError, match="500 bytes of this API key wait, and the rest is for others"):
                    model.admit(1, "flood")
                with model.admit(400, "other"), pytest.raises(QueueFullError, match="900 bytes wait"):
                    model.admit(101, "")
                with model.admit(500, ""):  # who is nobody in particular may have all
                    pass
            with model.admit(1000, "flood"):
                pass

    run(ask())
