"""A request that kills the worker process costs its own answer, and no other's."""

from __future__ import annotations

import asyncio
import re

import pytest
import torch

from exportkit.errors import ModelLoadError
from exportkit.serve.batching.pending import BatchLimits
from exportkit.serve.engine import model_replica
from exportkit.serve.engine.served import ServedModel
from exportkit.serve.statuses import BackendError, NotReadyError
from tests.fixtures.softpool_library import ABORT, RAISE, SEGFAULT
from tests.serve.engine.asking import only, request, serving, serving_model, tensors, until


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    """A worker is started again at once."""
    monkeypatch.setattr(model_replica, "FIRST_DELAY", 0.01)


def call(first: float = 0.0, batch: int = 1) -> dict[str, torch.Tensor]:
    tokens = torch.randn(batch, 4, 8)
    tokens[0, 0, 0] = first
    return {"tokens": tokens, "bias": torch.zeros(batch, 4)}


def worker(model: ServedModel) -> int:
    (only_one,) = model.package.replicas
    return only_one.model.pid


async def test_a_crash_costs_the_answer_of_the_request_that_crashes(misbehaving_package):
    async with serving(misbehaving_package, isolate=True) as repository:
        model = only(repository)
        assert model.metadata()["batching"]["enabled"]
        before = worker(model)
        bad = asyncio.ensure_future(model.infer(request(call(SEGFAULT))))
        good = [call() for _ in range(4)]
        answers = [asyncio.ensure_future(model.infer(request(each))) for each in good]
        done = await asyncio.gather(*answers)
        with pytest.raises(BackendError) as failure:
            await bad
        await until(lambda: repository.ready)
        assert worker(model) != before
        # An error that the operator raises is no crash. (torch 2.11 says it on stderr.)
        running = worker(model)
        with pytest.raises(BackendError, match=r"444 is not to my taste|message may be on stderr"):
            await model.infer(request(call(RAISE)))
        assert worker(model) == running
        again = await model.infer(request(good[0]))
    assert re.search("lost its worker process.*SIGSEGV", failure.value.message)
    torch.testing.assert_close(tensors(again), tensors(done[0]))  # its batch was larger
    assert (model.counted.failures["backend"].count, model.counted.success.count) == (2, 5)


async def test_requests_beside_a_crash_are_answered(misbehaving_package):
    """Two runners share the worker process: what ran beside the bad request runs again, and not beside another."""
    limits = BatchLimits(max_rows=1)
    async with serving_model(misbehaving_package, isolate=True, runners=2, warm_up=False, batch=limits) as model:
        good = [model.infer(request(call())) for _ in range(12)]
        bad = [model.infer(request(call(ABORT))) for _ in range(3)]
        mixed = [*good[:3], bad[0], *good[3:6], bad[1], bad[2], *good[6:]]
        await asyncio.gather(*mixed, return_exceptions=True)
    assert model.counted.success.count == 12
    assert {reason: spent.count for reason, spent in model.counted.failures.items()} == {"backend": 3}


async def test_a_model_that_cannot_be_loaded_again_is_not_ready_and_keeps_nobody_waiting(
    misbehaving_package, monkeypatch
):
    async with serving(misbehaving_package, isolate=True, warm_up=False) as repository:
        model = only(repository)
        (served,) = model.package.replicas
        load = served._load

        def fail():
            raise ModelLoadError("no memory")

        monkeypatch.setattr(served, "_load", fail)
        crashed = asyncio.ensure_future(model.infer(request(call(ABORT))))
        with pytest.raises(NotReadyError, match="cannot be loaded again: no memory"):
            await crashed
        assert not repository.ready
        (entry,) = repository.index()
        assert entry.state == "UNAVAILABLE"
        assert "no memory" in entry.reason
        with pytest.raises(NotReadyError, match="no memory"), model.admit(10):
            pytest.fail("it was admitted")
        with pytest.raises(NotReadyError, match="no memory"):
            await model.infer(request(call()))
        monkeypatch.setattr(served, "_load", load)
        await until(lambda: repository.ready)
        await model.infer(request(call()))


async def test_a_package_that_was_replaced_is_not_loaded_in_the_old_ones_place(
    misbehaving_package, rows_package, tmp_path
):
    package = tmp_path / "softpool.pt2"
    package.write_bytes(misbehaving_package.read_bytes())
    async with serving(package, isolate=True, warm_up=False) as repository:
        model = only(repository)
        (tmp_path / "new").write_bytes(rows_package.read_bytes())
        (tmp_path / "new").replace(package)
        with pytest.raises(NotReadyError, match="replaced by another package"):
            await model.infer(request(call(ABORT)))
        await repository.load("rows", {})
        assert repository.ready
        assert only(repository).manifest.call != model.manifest.call
