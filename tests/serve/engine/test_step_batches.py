"""Steps of sequences run in one call where the rows of the state are independent, with the bits of each alone."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

import exportkit
from exportkit.errors import ModelRunError
from exportkit.runtime.model import Model
from exportkit.serve.batching.pending import BatchLimits
from exportkit.serve.protocol.inference import SequenceStep
from exportkit.serve.statuses import BadRequestError
from tests.serve.engine import ticker
from tests.serve.engine.asking import GATHERING, only, request, serving, tensors


async def played(package: Path, limits: BatchLimits, **load):
    """Plays ten sequences of one or two rows in turns. Returns answers, counters, and what is said of batches."""
    async with serving(package, batch=limits, **load) as repository:
        model = only(repository)
        found: list[list[torch.Tensor]] = [[] for _ in range(10)]
        for number in range(5):
            steps = [SequenceStep(1 + which, number == 0, number == 4) for which in range(10)]
            given = [ticker.inputs(10 * number + which, 1 + which % 2) for which in range(10)]
            answers = await asyncio.gather(*(model.infer(request(g, sequence=s)) for g, s in zip(given, steps)))
            for each, answer in zip(found, answers):
                each.append(tensors(answer)["0"])
        assert repository.sequences()["ticker"].ended == {"end": 10}
        return found, model.counted, model.metadata()["batching"], model.config()


async def test_steps_of_sequences_that_run_together_have_the_bits_of_sessions(ticker_package):
    found, counted, batching, config = await played(ticker_package, GATHERING)
    assert (batching["enabled"], batching["dimension"], batching["max_rows"]) == (True, "batch", 16)
    assert batching["bit_equal"]
    assert counted.rows == 75
    assert counted.executions <= 20
    assert config["max_batch_size"] == 16
    assert "dynamic_batching" not in config
    with exportkit.load(ticker_package) as model:
        for which, answers in enumerate(found):
            with model.session(batch=1 + which % 2) as session:
                for number, answer in enumerate(answers):
                    given = ticker.inputs(10 * number + which, 1 + which % 2)
                    assert torch.equal(answer, session(*given.values()))


async def test_without_room_a_warm_up_or_independent_rows_and_in_a_worker_steps_run_alone(ticker_package, tmp_path):
    coupled = ticker.write(tmp_path / "ticker.pt2", coupling=1.0)
    for path, limits, load, reason in (
        (ticker_package, BatchLimits(max_rows=1), {}, "at most 1 rows"),
        (ticker_package, BatchLimits(), {"warm_up": False}, "the warm-up is off"),
        (ticker_package, BatchLimits(), {"isolate": True}, "in a worker process"),
        (coupled, GATHERING, {}, "sequences influence one another"),
    ):
        _, counted, batching, _ = await played(path, limits, **load)
        assert reason in batching["reason"]
        assert counted.executions == 50


async def test_steps_that_fail_together_run_one_by_one_and_lose_no_state(ticker_package, monkeypatch):
    whole = Model.run_steps
    tried = []

    def sometimes(self, steps, *how):
        tried.append(len(steps))
        if len(tried) > 2:
            raise ModelRunError("no memory for so many")
        return whole(self, steps, *how)

    monkeypatch.setattr(Model, "run_steps", sometimes)
    found, counted, batching, _ = await played(ticker_package, GATHERING)
    assert batching["enabled"]
    assert counted.executions > 20
    with exportkit.load(ticker_package) as model, model.session(batch=2) as session:
        for number, answer in enumerate(found[1]):
            assert torch.equal(answer, session(*ticker.inputs(10 * number + 1, 2).values()))


async def test_a_sequence_of_more_rows_than_a_batch_is_refused_at_once(ticker_package):
    async with serving(ticker_package, batch=BatchLimits(max_rows=4)) as repository:
        step = SequenceStep(1, start=True)
        with pytest.raises(BadRequestError, match="has 5 rows, and a batch has 1 to 4"):
            await only(repository).infer(request(ticker.inputs(0, 5), sequence=step))
        assert repository.sequences()["ticker"].count == 0
