"""Copies on several devices: what waits goes to the one that is free, and one that is lost stops no other.

Two copies on the CPU are two devices to everything but the kernels.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from exportkit.serve.batching.pending import BatchLimits
from exportkit.serve.engine import model_replica
from exportkit.serve.engine.repository import Repository
from exportkit.serve.operations.metrics import Metrics
from exportkit.serve.statuses import NotReadyError, ServeError
from tests.serve.engine.asking import equal, only, request, serving, tensors
from tests.serve.engine.rows import answer, example

ONE_BY_ONE = BatchLimits(max_rows=1)


def ready_replicas(repository: Repository) -> list[float]:
    lines = generate_latest(Metrics(repository).registry).decode().splitlines()
    return [float(line.split()[-1]) for line in lines if line.startswith("exportkit_replica_ready{")]


async def right_answers(repository: Repository, count: int) -> int:
    """Asks so many times at once. Returns how many answers were right; others are errors."""
    given = [example(1) for _ in range(count)]
    asked = [only(repository).infer(request(inputs)) for inputs in given]
    answers = await asyncio.gather(*asked, return_exceptions=True)
    answered = [(inputs, got) for inputs, got in zip(given, answers) if not isinstance(got, BaseException)]
    assert all(isinstance(got, ServeError) for got in answers if isinstance(got, BaseException))
    assert all(equal(tensors(got), answer(inputs)) for inputs, got in answered)
    return len(answered)


async def test_a_lost_device_takes_no_requests_and_the_others_go_on(rows_package: Path) -> None:
    async with serving(rows_package, devices=("cpu", "cpu"), batch=ONE_BY_ONE) as repository:
        model = only(repository)
        assert ready_replicas(repository) == [1, 1]
        first, second = model.package.replicas
        first.lose("an illegal memory access was encountered")
        assert await right_answers(repository, 16) >= 14  # each of its runners may have taken one by then
        assert [await right_answers(repository, 16) for _ in range(4)] == [16] * 4
        assert (model.ready, repository.ready, repository.lost) == (True, True, None)
        assert ready_replicas(repository) == [0, 1]
        second.lose("an illegal memory access was encountered")
        with pytest.raises(NotReadyError):
            await model.infer(request(example(1)))
        assert (model.ready, repository.ready) == (False, False)
        assert repository.lost is not None
        assert "cpu is lost to this process" in repository.lost


async def test_a_worker_that_is_killed_leaves_the_others_and_comes_back(rows_package: Path, monkeypatch) -> None:
    monkeypatch.setattr(model_replica, "FIRST_DELAY", 0.01)
    async with serving(rows_package, devices=("cpu", "cpu"), isolate=True, batch=ONE_BY_ONE) as repository:
        model = only(repository)
        pids = [each.model.pid for each in model.package.replicas]
        assert len(set(pids)) == 2
        os.kill(pids[0], signal.SIGKILL)
        while ready_replicas(repository) != [1, 1] or model.package.replicas[0].model.pid == pids[0]:
            assert model.ready
            assert await right_answers(repository, 4) >= 3  # what ran in the worker when it died has no answer
        assert model.package.replicas[1].model.pid == pids[1]
