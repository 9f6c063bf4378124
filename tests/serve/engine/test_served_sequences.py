"""Steps of sequences are answered as a session answers calls. Limits, new versions and drains keep their promises.

What the table of sequences does is tested in tests/serve/sequences.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import exportkit
from exportkit.serve.engine.repository import Repository
from exportkit.serve.engine.served import ServedModel
from exportkit.serve.engine.served_sequences import ServedSequences
from exportkit.serve.protocol.inference import SequenceStep
from exportkit.serve.sequences.table import SequenceLimits
from exportkit.serve.statuses import (
    BackendError,
    BadRequestError,
    DeadlineError,
    NotOfferedError,
    NotServedError,
    QueueFullError,
    SequenceError,
    ServeError,
    TooLargeError,
)
from exportkit.verify import judging
from tests.runtime import stateful
from tests.serve.engine import asking
from tests.serve.engine.asking import request, tensors, until

SOON = SequenceLimits(idle_seconds=0.2, finish_seconds=0.5)


@asynccontextmanager
async def serving(
    *packages: Path, limits: SequenceLimits | None = None, **load: Any
) -> AsyncIterator[tuple[Repository, ServedModel, ServedSequences]]:
    """A repository, the model of `push`, and the sequences."""
    async with asking.serving(*packages, sequences=limits or SequenceLimits(), **load) as served:
        sequences = served.sequences()["recorder"]
        try:
            yield served, served.model("recorder.push"), sequences
        finally:
            for sequence in sequences._table:
                sequences._end(sequence, "unloaded")  # nobody waits for those that a test leaves


def rows(seed: int, count: int = 2) -> torch.Tensor:
    return torch.rand(count, stateful.WIDTH, generator=torch.Generator().manual_seed(seed))


async def push(model: ServedModel, x: torch.Tensor, sequence: Any, **more: Any) -> torch.Tensor:
    owner, start, end = more.pop("owner", ""), more.pop("start", False), more.pop("end", False)
    step = SequenceStep(sequence, start, end, owner)
    answer = await model.infer(request({"x": x}, sequence=step, **more))
    return tensors(answer)["0"]


def as_a_session_answers(package: Path, given: Iterable[torch.Tensor], answers: Iterable[torch.Tensor]) -> bool:
    given = list(given)
    with exportkit.load(package) as model, model.session(batch=len(given[0])) as session:
        return all(torch.equal(session.push(x), answer) for x, answer in zip(given, answers, strict=True))


@pytest.mark.parametrize("isolate", [False, True])
async def test_two_interleaved_sequences_equal_two_sessions(recorder_package, isolate):
    """A number and its text are two ids."""
    async with serving(recorder_package, isolate=isolate) as (repository, model, sequences):
        answers: dict[Any, list[torch.Tensor]] = {7: [], "7": []}
        for number in range(5):
            for which, given in enumerate(answers):
                x = rows(10 * number + which, 2 + which)
                answers[given].append(await push(model, x, given, start=number == 0))
        scale = {"scale": torch.full((3, 1), 2.0)}
        step = SequenceStep("7", end=True)
        last = tensors(await repository.model("recorder.peek").infer(request(scale, sequence=step)))["0"]
        assert sequences.ended == {"end": 1}
    with exportkit.load(recorder_package) as model:
        for which, given in enumerate(answers.values()):
            with model.session(batch=2 + which) as session:
                for number, answer in enumerate(given):
                    assert torch.equal(answer, session.push(rows(10 * number + which, 2 + which)))
                peeked = session.peek(torch.full((2 + which, 1), 2.0))
        assert torch.equal(last, peeked)


async def test_steps_that_come_at_the_same_time_run_in_their_order_and_count_as_what_waits(recorder_package):
    async with serving(recorder_package, runners=4) as (_, model, _):
        steps = [push(model, rows(number), 1, start=number == 0, end=number == 5) for number in range(6)]
        others = [push(model, rows(number), 2, start=number == 0, end=number == 5) for number in range(6)]
        asked = [asyncio.ensure_future(each) for pair in zip(steps, others) for each in pair]
        await asyncio.sleep(0)
        assert model.counted.pending >= 10
        found = await asyncio.gather(*asked)
        assert (model.counted.queued_rows, model.counted.pending, model.counted.queued_bytes) == (0, 0, 0)
    for which in (0, 1):
        assert as_a_session_answers(recorder_package, map(rows, range(6)), found[which::2])


async def test_what_is_refused_says_why_and_changes_nothing(recorder_package):
    async with serving(recorder_package, limits=SequenceLimits(most_bytes=500)) as (repository, model, sequences):
        with pytest.raises(BadRequestError, match="keeps state, which belongs to a sequence") as missing:
            await model.infer(request({"x": rows(0)}))
        assert "sequence_start" in missing.value.text
        with pytest.raises(NotOfferedError, match="keeps no state"):
            await push(repository.model("recorder.embed"), rows(0), 1, start=True)
        with pytest.raises(TooLargeError, match="would have 904 bytes, and all sequences may have 500") as refused:
            await push(model, rows(0, 8), 1, start=True)
        assert "--max-sequence-bytes" in refused.value.hint
        with pytest.raises(SequenceError, match="recorder has no sequence 1"):
            await push(model, rows(0), 1)
        assert (sequences.count, sequences.state_bytes) == (0, 0)
        await push(model, rows(0), 1, start=True)
        await push(model, rows(0), 2, start=True)
        with pytest.raises(QueueFullError, match="has 464 bytes, and at most 500 may be"):
            await push(model, rows(0), 3, start=True)
        with pytest.raises(SequenceError, match="has no sequence 1"):
            await push(model, rows(0), 1, owner="another key")
        with pytest.raises(BadRequestError, match="began with batch=2, and this request has 3"):
            await push(model, rows(0, 3), 1)
        begin = SequenceStep(1, start=True)
        for given, more, words in [
            ({"x": torch.rand(2, 5)}, {}, "must have size 4"),
            ({"x": torch.rand(9, 4)}, {}, "batch"),
            ({}, {}, "is missing"),
            ({"x": rows(0)}, {"timeout": -1.0}, "passed before it arrived"),
            ({"x": rows(0)}, {"method": "none"}, "not served"),
        ]:
            with pytest.raises((BadRequestError, DeadlineError, NotServedError), match=words):
                await model.infer(request(given, sequence=begin, **more))
        last = await push(model, rows(1), 1, end=True)
        with pytest.raises(SequenceError, match="its last step was answered"):
            await push(model, rows(0), 1)
        assert (model.counted.queued_rows, model.counted.pending, model.counted.queued_bytes) == (0, 0, 0)
    with exportkit.load(recorder_package) as model, model.session(batch=2) as session:
        session.push(rows(0))
        assert torch.equal(last, session.push(rows(1)))


async def test_a_step_that_fails_ends_its_sequence_and_no_other(recorder_package):
    async with serving(recorder_package) as (_, model, sequences):
        await push(model, rows(0), 2, start=True)
        steps = [push(model, rows(number), 1, start=number == 0) for number in range(9)]
        found = await asyncio.gather(*steps, return_exceptions=True)
        assert [type(each) for each in found] == [torch.Tensor] * 6 + [BackendError] + [SequenceError] * 2
        assert "the model failed on one of its steps" in found[-1].text
        with pytest.raises(SequenceError, match="the model failed") as again:
            await push(model, rows(0), 1)
        assert "sequence_start" in again.value.hint
        await push(model, rows(1), 2)
        assert sequences.ended == {"failed": 1}
        assert model.counted.failures["sequence"].count == 3
        last = await push(model, rows(0), 1, start=True)
    assert as_a_session_answers(recorder_package, [rows(0)], [last])


async def test_recorded_sequences_are_replayed_before_a_model_is_ready(monkeypatch):
    package = Path(__file__).parents[2] / "golden" / "state-1-cpu.pt2"
    compare = judging.compare_outputs

    def wrong(*given, **more):
        return compare(given[0], given[1], [tensor + 1 for tensor in given[2]], **more)

    async with asking.serving_model(package) as model:
        assert model.name == "golden-state.remember"  # recall writes into an input
    monkeypatch.setattr(judging, "compare_outputs", wrong)
    with pytest.raises(BackendError, match="answers its recorded case 0 wrongly on cpu: call 0: "):
        await asking.serving(package).__aenter__()


async def test_an_idle_sequence_ends_and_says_so(recorder_package):
    async with serving(recorder_package, limits=SOON) as (_, model, sequences):
        await push(model, rows(0), 1, start=True)
        for _ in range(4):
            await asyncio.sleep(0.1)
            await push(model, rows(0), 1)  # it does not idle for so long
        assert sequences.count == 1
        assert sequences.oldest >= 0.4
        await until(lambda: not sequences.count)
        assert (sequences.ended, sequences.state_bytes) == ({"idle": 1}, 0)
        with pytest.raises(SequenceError, match="no step came for too long"):
            await push(model, rows(0), 1)


async def test_a_step_whose_answer_nobody_gets_ends_its_sequence(recorder_package):
    """Its client leaves, its timeout passes, or its answer cannot be sent."""
    async with serving(recorder_package) as (repository, model, sequences):
        await push(model, rows(0), 1, start=True)
        leaves = [asyncio.ensure_future(push(model, rows(0), 1)) for _ in range(3)]
        await asyncio.sleep(0)
        leaves[1].cancel()
        found = await asyncio.gather(*leaves, return_exceptions=True)
        assert isinstance(found[0], (torch.Tensor, SequenceError))  # it may run already
        assert [type(each) for each in found[1:]] == [asyncio.CancelledError, SequenceError]
        await push(model, rows(0), 1, start=True)
        with pytest.raises(DeadlineError):
            await push(model, rows(0), 1, timeout=1e-9)
        for asked in (model, repository.named("recorder")):
            await push(model, rows(0), 1, start=True)
            asked.cancel(SequenceStep(1, owner="another key"))
            asked.cancel(SequenceStep(1))
            asked.cancel(SequenceStep(1))
            with pytest.raises(SequenceError, match="given up"):
                await push(model, rows(0), 1)
        assert sequences.ended == {"unanswered": 4}


async def test_a_lost_worker_ends_its_sequences_with_a_status(recorder_package):
    async with serving(recorder_package, isolate=True) as (repository, model, sequences):
        for sequence in (1, 2):
            await push(model, rows(0), sequence, start=True)
        (replica,) = model.package.replicas
        os.kill(replica.model.pid, signal.SIGKILL)
        with pytest.raises((BackendError, SequenceError)):
            await push(model, rows(0), 1)
        await until(lambda: repository.ready and not sequences.count)
        assert sequences.ended == {"lost": 2}
        with pytest.raises(SequenceError, match="the process with its state died"):
            await push(model, rows(0), 2)
        last = await push(model, rows(0), 2, start=True)
    assert as_a_session_answers(recorder_package, [rows(0)], [last])


async def test_a_sequence_goes_on_with_the_load_that_it_began_with(recorder_package, tmp_path):
    def put(version: str) -> None:
        folder = tmp_path / "recorder" / version
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(recorder_package, folder / "new")
        (folder / "new").replace(folder / "model.pt2")

    put("1")
    async with serving(repository=tmp_path, limits=SequenceLimits(finish_seconds=20.0)) as (
        repository,
        before,
        sequences,
    ):
        found = [await push(before, rows(0), 1, start=True)]
        put("2")  # a newer version beside it
        await repository.load("recorder", {})
        newer = repository.model("recorder.push")
        assert newer.version == "2"
        answer = await newer.infer(request({"x": rows(1)}, sequence=SequenceStep(1)))
        assert answer.version == "1"
        found.append(tensors(answer)["0"])
        with before.admit(10):  # a body is on its way
            put("1")  # its file is exchanged
            await repository.load("recorder", {})
            assert repository.model("recorder.push", "1") is not before
            found.append(await push(repository.model("recorder.push", "1"), rows(2), 1))
            assert not before.package.closed
            await push(before, rows(0), 2, start=True)  # what begins now begins on the new load
            assert sequences.on(before.package) == 1
            found.append(await push(newer, rows(3), 1, end=True))
        await until(lambda: before.package.closed)
        await push(before, rows(0), 2, end=True)  # was looked up before
    assert as_a_session_answers(recorder_package, map(rows, range(4)), found)


async def test_each_sequence_stays_on_the_replica_that_began_it(recorder_package):
    async with serving(recorder_package, devices=("cpu", "cpu")) as (_, model, sequences):
        for sequence in range(1, 5):
            await push(model, rows(0), sequence, start=True)
        for _ in range(3):
            await asyncio.gather(*(push(model, rows(1), sequence) for sequence in range(1, 5)))
        places = {each.payload._model: each.payload.replica for each in sequences._table}
        assert sorted(places.values()) == [0, 1]
        assert [sequences.on(model.package, each) for each in (0, 1)] == [2, 2]


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_clients_do_each_answer_is_of_its_own_state(recorder_package, seed):
    """They begin, go on, leave, come too late, send what is refused, and two keys use the same ids."""
    draw, log = random.Random(seed), []

    async def client(model: ServedModel, owner: str, each: Any) -> None:
        given: list[torch.Tensor] | None = None  # since the sequence began; None: there is none
        for _ in range(40):
            x, kind = rows(draw.randrange(1 << 30)), draw.random()
            start = given is None or kind < 0.1
            try:
                if kind < 0.2:
                    task = asyncio.ensure_future(push(model, x, each, owner=owner, start=start))
                    for _ in range(draw.randrange(3)):
                        await asyncio.sleep(0)
                    task.cancel()
                    await asyncio.wait([task])
                    given = None
                    continue
                if kind < 0.25:
                    with pytest.raises(BadRequestError):
                        await push(model, x[:, :3], each, owner=owner, start=True)
                    continue
                end = kind > 0.9
                answer = await push(model, x, each, owner=owner, start=start, end=end, timeout=5.0)
                given = [x] if start or given is None else [*given, x]
                log.append((list(given), answer))
                given = None if end else given
            except ServeError:  # push fails after six calls, too
                given = None
            await asyncio.sleep(0)

    async with serving(recorder_package, limits=SOON, runners=2) as (_, model, sequences):
        names = [(owner, each) for owner in ("a", "b") for each in (7, "7", 8)]
        await asyncio.gather(*(client(model, *name) for name in names))
        await until(lambda: not sequences.count)
        assert sequences.state_bytes == 0
        assert (model.counted.queued_rows, model.counted.queued_bytes, model.counted.pending) == (0, 0, 0)
    assert len(log) > 50
    with exportkit.load(recorder_package) as model:
        for given, answer in log:
            with model.session(batch=2) as session:
                for x in given:
                    last = session.push(x)
            assert torch.equal(answer, last)
