"""Steps of sequences are answered as a session answers calls. Limits, new versions and drains keep their promises."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import exportkit
from exportkit.serve.engine.repository import Repository
from exportkit.serve.engine.served import ServedModel
from exportkit.serve.protocol.inference import SequenceStep
from exportkit.serve.sequences.table import SequenceLimits
from exportkit.serve.serve_options import LoadOptions, ServeOptions
from exportkit.serve.statuses import (
    BackendError,
    BadRequestError,
    DeadlineError,
    NotOfferedError,
    NotReadyError,
    QueueFullError,
    SequenceError,
)
from exportkit.verify import judging
from tests.runtime import stateful
from tests.serve.engine.asking import request, tensors

SOON = SequenceLimits(idle_seconds=0.2, finish_seconds=0.5)


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """push and peek have state, embed has none; push fails after six calls."""
    return stateful.write(tmp_path_factory.mktemp("sequences") / "recorder.pt2")


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 120))


@asynccontextmanager
async def serving(*packages: Path, repository: Path | None = None, limits: SequenceLimits | None = None, **load: Any):
    options = ServeOptions(packages, repository, LoadOptions(**load), sequences=limits or SequenceLimits())
    served = Repository(options)
    await served.open()
    try:
        yield served
    finally:
        for entry in served.sequences().values():
            for sequence in entry._table:
                entry._end(sequence, "unloaded")  # nobody waits for those that a test leaves
        await served.drain()


def rows(seed: int, count: int = 2) -> torch.Tensor:
    return torch.rand(count, stateful.WIDTH, generator=torch.Generator().manual_seed(seed))


async def push(model: ServedModel, x: torch.Tensor, sequence: Any, **more: Any) -> torch.Tensor:
    owner, start, end = more.pop("owner", ""), more.pop("start", False), more.pop("end", False)
    step = SequenceStep(sequence, start, end, owner)
    answer = await model.infer(request({"x": x}, sequence=step, **more))
    return tensors(answer)["0"]


@pytest.mark.parametrize("isolate", [False, True])
@pytest.mark.process
def test_two_interleaved_sequences_equal_two_sessions(recorder, isolate):
    async def ask():
        async with serving(recorder, isolate=isolate) as repository:
            model = repository.model("recorder.push")
            peek = repository.model("recorder.peek")
            answers: dict[Any, list[torch.Tensor]] = {7: [], "seven": []}
            for number in range(5):
                for which, given in enumerate(answers):
                    x = rows(10 * number + which, 2 + which)
                    answers[given].append(await push(model, x, given, start=number == 0))
            step = SequenceStep("seven", end=True)
            scale = {"scale": torch.full((3, 1), 2.0)}
            last = tensors(await peek.infer(request(scale, sequence=step)))["0"]
            assert repository.sequences()["recorder"].ended == {"end": 1}
            return answers, last

    answers, last = run(ask())
    with exportkit.load(recorder) as model:
        for which, given in enumerate(answers.values()):
            with model.session(batch=2 + which) as session:
                for number, answer in enumerate(given):
                    assert torch.equal(answer, session.push(rows(10 * number + which, 2 + which)))
                peeked = session.peek(torch.full((2 + which, 1), 2.0))
        assert torch.equal(last, peeked)


def test_steps_that_come_at_the_same_time_run_in_their_order(recorder):
    async def ask():
        async with serving(recorder, runners=4) as repository:
            model = repository.model("recorder.push")
            steps = [push(model, rows(number), 1, start=number == 0, end=number == 5) for number in range(6)]
            others = [push(model, rows(number), 2, start=number == 0, end=number == 5) for number in range(6)]
            return await asyncio.gather(*(each for pair in zip(steps, others) for each in pair))

    found = run(ask())
    with exportkit.load(recorder) as model, model.session(batch=2) as session:
        for number in range(6):
            expected = session.push(rows(number))
            assert torch.equal(found[2 * number], expected)
            assert torch.equal(found[2 * number + 1], expected)


def test_what_does_not_belong_to_a_sequence_is_refused_with_the_reason(recorder):
    async def ask():
        async with serving(recorder) as repository:
            model, embed = repository.model("recorder.push"), repository.model("recorder.embed")
            with pytest.raises(BadRequestError, match="keeps state, which belongs to a sequence") as missing:
                await model.infer(request({"x": rows(0)}))
            assert "sequence_start" in missing.value.text
            with pytest.raises(NotOfferedError, match="keeps no state"):
                await push(embed, rows(0), 1, start=True)
            with pytest.raises(SequenceError, match="recorder has no sequence 1"):
                await push(model, rows(0), 1)
            await push(model, rows(0), 1, start=True)
            with pytest.raises(BadRequestError, match="began with batch=2, and this request has 3"):
                await push(model, rows(0, 3), 1)
            with pytest.raises(BadRequestError, match="must have size 4"):
                await push(model, torch.rand(2, 5), 1)
            with pytest.raises(SequenceError, match="has no sequence '1'"):
                await push(model, rows(0), "1")
            with pytest.raises(SequenceError, match="has no sequence 1"):
                await push(model, rows(0), 1, owner="another key")
            await push(model, rows(0), 1, start=True, owner="another key")
            await push(model, rows(1), 1, end=True)  # what was refused changed nothing
            with pytest.raises(SequenceError, match="its last step was answered"):
                await push(model, rows(0), 1)
            assert (SequenceError.status, SequenceError.code) == (409, "FAILED_PRECONDITION")

    run(ask())


def test_a_step_that_fails_ends_its_sequence_and_no_other(recorder):
    async def ask():
        async with serving(recorder) as repository:
            model = repository.model("recorder.push")
            await push(model, rows(0), 2, start=True)
            steps = [push(model, rows(number), 1, start=number == 0) for number in range(9)]
            found = await asyncio.gather(*steps, return_exceptions=True)
            assert [type(each) for each in found] == [torch.Tensor] * 6 + [BackendError] + [SequenceError] * 2
            assert "the model failed on one of its steps" in found[-1].text
            with pytest.raises(SequenceError, match="the model failed") as again:
                await push(model, rows(0), 1)
            assert "sequence_start" in again.value.hint
            first = await push(model, rows(0), 1, start=True)
            await push(model, rows(1), 2)
            assert repository.sequences()["recorder"].ended == {"failed": 1}
            assert model.counted.failures["sequence"].count == 3
            return first

    first = run(ask())
    with exportkit.load(recorder) as model, model.session(batch=2) as session:
        assert torch.equal(first, session.push(rows(0)))


def test_beginning_again_answers_what_waits_and_begins_with_fresh_state(recorder):
    async def ask():
        async with serving(recorder, limits=SequenceLimits(most=2)) as repository:
            model = repository.model("recorder.push")
            found = await asyncio.gather(*(push(model, rows(number), 1, start=number in (0, 2)) for number in range(4)))
            assert repository.sequences()["recorder"].ended == {"restarted": 1}
            return found

    found = run(ask())
    with exportkit.load(recorder) as model:
        for first in (0, 2):
            with model.session(batch=2) as session:
                for number in (first, first + 1):
                    assert torch.equal(found[number], session.push(rows(number)))


def test_limits_refuse_what_is_new_and_nothing_else(recorder):
    with exportkit.load(recorder) as model:
        size = model.session(batch=2).state_bytes

    async def ask(limits, words):
        async with serving(recorder, limits=limits) as repository:
            model = repository.model("recorder.push")
            await push(model, rows(0), 1, start=True)
            await push(model, rows(0), 2, start=True)
            assert repository.sequences()["recorder"].state_bytes == 2 * size
            with pytest.raises(QueueFullError, match=words):
                await push(model, rows(0), 3, start=True)
            await push(model, rows(0), 1)
            await push(model, rows(0), 2, start=True)  # in its own place
            await push(model, rows(0), 1, end=True)
            await push(model, rows(0), 3, start=True)

    run(ask(SequenceLimits(most=2), "there are 2 sequences, and at most 2 may be"))
    run(ask(SequenceLimits(most_bytes=2 * size + 1), f"has {2 * size} bytes, and at most {2 * size + 1} may be"))


def test_steps_that_wait_for_their_turn_count_as_what_waits(recorder):
    async def ask():
        async with serving(recorder) as repository:
            model = repository.model("recorder.push")
            steps = [asyncio.ensure_future(push(model, rows(number), 1, start=number == 0)) for number in range(6)]
            await asyncio.sleep(0)
            assert model.counted.queued_rows >= 5
            await asyncio.gather(*steps)
            assert (model.counted.queued_rows, model.counted.pending, model.counted.queued_bytes) == (0, 0, 0)

    run(ask())


def test_recorded_sequences_are_replayed_before_a_model_is_ready(monkeypatch):
    package = Path(__file__).parents[2] / "golden" / "state-1-cpu.pt2"
    played = []
    compare = judging.compare_outputs
    monkeypatch.setattr(judging, "compare_outputs", lambda *given, **more: played.append(1) or compare(*given, **more))

    async def ask():
        async with serving(package) as repository:
            return [model.name for model in repository.models()], len(played)

    names, count = run(ask())
    with exportkit.load(package) as model:
        stateful_calls = [call for case in model.cases for call in case.calls]
        assert count >= len(stateful_calls) > 1
    assert names == ["golden-state.remember"]  # recall writes into an input

    def wrong(*given, **more):
        return compare(given[0], given[1], [tensor + 1 for tensor in given[2]], **more)

    monkeypatch.setattr(judging, "compare_outputs", wrong)
    with pytest.raises(BackendError, match="answers its recorded case 0 wrongly on cpu: call 0: "):
        run(ask())


def test_an_idle_sequence_ends_and_says_so(recorder):
    async def ask():
        async with serving(recorder, limits=SOON) as repository:
            model, sequences = repository.model("recorder.push"), repository.sequences()["recorder"]
            await push(model, rows(0), 1, start=True)
            for _ in range(4):
                await asyncio.sleep(0.1)
                await push(model, rows(0), 1)  # it does not idle for so long
            assert sequences.count == 1
            assert sequences.oldest >= 0.4
            while sequences.count:
                await asyncio.sleep(0.02)
            assert sequences.ended == {"idle": 1}
            assert sequences.state_bytes == 0
            with pytest.raises(SequenceError, match="no step came for too long"):
                await push(model, rows(0), 1)

    run(ask())


def test_a_client_that_leaves_or_is_too_late_ends_its_sequence(recorder):
    async def ask():
        async with serving(recorder) as repository:
            model, sequences = repository.model("recorder.push"), repository.sequences()["recorder"]
            await push(model, rows(0), 1, start=True)
            leaves = [asyncio.ensure_future(push(model, rows(0), 1)) for _ in range(3)]
            await asyncio.sleep(0)
            leaves[1].cancel()
            found = await asyncio.gather(*leaves, return_exceptions=True)
            assert isinstance(found[0], (torch.Tensor, SequenceError))  # it may run already
            assert [type(each) for each in found[1:]] == [asyncio.CancelledError, SequenceError]
            assert sequences.ended == {"unanswered": 1}
            await push(model, rows(0), 1, start=True)
            with pytest.raises(DeadlineError):
                await push(model, rows(0), 1, timeout=1e-9)
            with pytest.raises(SequenceError, match="given up"):
                await push(model, rows(0), 1)

    run(ask())


@pytest.mark.process
def test_a_lost_worker_ends_its_sequences_with_a_status(recorder):
    async def ask():
        async with serving(recorder, isolate=True) as repository:
            model, sequences = repository.model("recorder.push"), repository.sequences()["recorder"]
            for sequence in (1, 2):
                await push(model, rows(0), sequence, start=True)
            (copy,) = model._copies
            os.kill(copy.model.pid, signal.SIGKILL)
            with pytest.raises((BackendError, SequenceError)):
                await push(model, rows(0), 1)
            while not repository.ready or sequences.count:
                await asyncio.sleep(0.02)
            assert sequences.ended == {"lost": 2}
            with pytest.raises(SequenceError, match="the process with its state died"):
                await push(model, rows(0), 2)
            return await push(model, rows(0), 2, start=True)

    found = run(ask())
    with exportkit.load(recorder) as model, model.session(batch=2) as session:
        assert torch.equal(found, session.push(rows(0)))


def test_a_sequence_goes_on_with_the_version_that_it_began_with(recorder, tmp_path):
    (tmp_path / "recorder").mkdir()
    for version in ("1", "2"):
        (tmp_path / "recorder" / version).mkdir()
    shutil.copy(recorder, tmp_path / "recorder" / "1" / "model.pt2")

    async def ask():
        limits = SequenceLimits(finish_seconds=20.0)
        async with serving(repository=tmp_path, limits=limits) as repository:
            before = repository.model("recorder.push")
            found = [await push(before, rows(0), 1, start=True)]
            # A newer version beside it.
            shutil.copy(recorder, tmp_path / "recorder" / "2" / "model.pt2")
            await repository.load("recorder", {})
            newer = repository.model("recorder.push")
            assert newer.version == "2"
            answer = await newer.infer(request({"x": rows(1)}, sequence=SequenceStep(1)))
            assert answer.version == "1"
            found.append(tensors(answer)["0"])
            # The file is exchanged.
            again = tmp_path / "recorder" / "1" / "model.pt2"
            shutil.copy(recorder, again.with_name("new"))
            again.with_name("new").replace(again)
            await repository.load("recorder", {})
            assert repository.model("recorder.push", "1") is not before
            found.append(await push(repository.model("recorder.push", "1"), rows(2), 1))
            assert not before._closed
            found.append(await push(newer, rows(3), 1, end=True))
            while not before._closed:
                await asyncio.sleep(0.02)
            await push(newer, rows(0), 1, start=True, end=True)
            return found

    found = run(ask())
    with exportkit.load(recorder) as model, model.session(batch=2) as session:
        for number, answer in enumerate(found):
            assert torch.equal(answer, session.push(rows(number)))


def test_a_drain_answers_sequences_to_their_end_within_a_limit(recorder):
    async def ask(ends: bool):
        limits = SequenceLimits(finish_seconds=20.0 if ends else 0.3)
        async with serving(recorder, limits=limits) as repository:
            model, sequences = repository.model("recorder.push"), repository.sequences()["recorder"]
            await push(model, rows(0), 1, start=True)
            draining = asyncio.ensure_future(repository.drain())
            await asyncio.sleep(0.05)
            assert not repository.ready
            with model.admit(10):
                await push(model, rows(1), 1)
            with pytest.raises(NotReadyError, match="begins any more: the server drains"):
                await push(model, rows(0), 2, start=True)
            assert not draining.done()
            if ends:
                await push(model, rows(2), 1, end=True)
            await draining
            assert sequences.ended == {"end" if ends else "unloaded": 1}
            with pytest.raises(NotReadyError), model.admit(10):
                pytest.fail("it was admitted")

    run(ask(True))
    run(ask(False))


def test_each_sequence_stays_on_the_copy_that_began_it(recorder):
    async def ask():
        async with serving(recorder, devices=("cpu", "cpu")) as repository:
            model, sequences = repository.model("recorder.push"), repository.sequences()["recorder"]
            for sequence in range(1, 5):
                await push(model, rows(0), sequence, start=True)
            for _ in range(3):
                await asyncio.gather(*(push(model, rows(1), sequence) for sequence in range(1, 5)))
            places = {each.payload.held._model: each.payload.copy for each in sequences._table}
            assert sorted(places.values()) == [0, 1]
            assert all(each.payload.home.counts == [2, 2] for each in sequences._table)

    run(ask())


def test_the_metadata_and_the_configuration_name_the_state(recorder):
    async def ask():
        async with serving(recorder, limits=SequenceLimits(most=5, idle_seconds=7.0)) as repository:
            model = repository.model("recorder.push")
            return model.metadata(), model.config(), repository.model("recorder.embed").metadata()

    metadata, config, other = run(ask())
    assert metadata["sequences"]["idle_seconds"] == 7.0
    assert metadata["sequences"]["most"] == 5
    assert metadata["sequences"]["state"][0] == {"name": "cache", "dtype": "float32", "shape": [-1, 6, 4]}
    assert config["sequence_batching"]["max_sequence_idle_microseconds"] == 7_000_000
    assert "sequences" not in other
    assert metadata["methods"]["peek"]["served_as"] == "recorder.peek"
