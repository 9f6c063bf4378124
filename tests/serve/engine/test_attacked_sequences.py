"""What clients may do to sequences, by mistake or not, hurts no other sequence, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import exportkit
from exportkit.serve.engine.repository import Repository
from exportkit.serve.protocol.inference import SequenceStep
from exportkit.serve.sequences.table import SequenceLimits
from exportkit.serve.statuses import (
    BadRequestError,
    DeadlineError,
    NotServedError,
    QueueFullError,
    SequenceError,
    ServeError,
    TooLargeError,
)
from tests.runtime import stateful
from tests.serve.engine import test_served_sequences as sequences
from tests.serve.engine.asking import request
from tests.serve.engine.test_served_sequences import SOON, push, rows, run, serving

recorder = sequences.recorder  # a fixture


def table(repository: Repository) -> Any:
    return repository.sequences()["recorder"]


def empty(repository: Repository) -> bool:
    found = table(repository)
    return (found.count, found.state_bytes) == (0, 0)


def test_a_number_and_its_text_are_two_sequences(recorder):
    ids = [7, "7", "07", "7 ", " 7", "7.0", (1 << 64) - 1, str((1 << 64) - 1), "x" * 128, "\0", "é", "\u202e"]

    async def ask():
        async with serving(recorder) as repository:
            model = repository.model("recorder.push")
            found: dict[Any, list[torch.Tensor]] = {each: [] for each in ids}
            for number in range(3):
                for which, each in enumerate(ids):
                    x = rows(100 * number + which)
                    found[each].append(await push(model, x, each, start=number == 0, end=number == 2))
            assert empty(repository)
            return found

    found = run(ask())
    with exportkit.load(recorder) as model:
        for which, answers in enumerate(found.values()):
            with model.session(batch=2) as session:
                for number, answer in enumerate(answers):
                    assert torch.equal(answer, session.push(rows(100 * number + which)))


def test_a_start_that_is_refused_leaves_nothing_and_touches_no_sequence_of_its_id(recorder):
    async def ask(begun: bool):
        async with serving(recorder) as repository:
            model = repository.model("recorder.push")
            if begun:
                await push(model, rows(0), 1, start=True)
            begin = SequenceStep(1, start=True)
            for refused, words in [
                (request({"x": torch.rand(2, 5)}, sequence=begin), "must have size 4"),
                (request({"x": torch.rand(9, 4)}, sequence=begin), "batch"),
                (request({"x": torch.rand(0, 4)}, sequence=begin), "batch"),
                (request({"x": torch.rand(2, 4, dtype=torch.float64)}, sequence=begin), "must be FP32"),
                (request({"y": torch.rand(2, 4)}, sequence=begin), "no input `y`"),
                (request({}, sequence=begin), "is missing"),
                (request({"x": torch.rand(2, 4)}, outputs=("none",), sequence=begin), "no output `none`"),
                (request({"x": torch.rand(2, 4)}, timeout=-1.0, sequence=begin), "passed before it arrived"),
                (request({"x": torch.rand(2, 4)}, method="none", sequence=begin), "says|not served"),
            ]:
                with pytest.raises((BadRequestError, DeadlineError, NotServedError), match=words):
                    await model.infer(refused)
            if not begun:
                assert empty(repository)
                with pytest.raises(SequenceError, match="has no sequence 1"):
                    await push(model, rows(1), 1)
                return None
            assert table(repository).count == 1
            return await push(model, rows(1), 1, end=True)

    assert run(ask(False)) is None
    last = run(ask(True))
    with exportkit.load(recorder) as model, model.session(batch=2) as session:
        session.push(rows(0))
        assert torch.equal(last, session.push(rows(1)))


def test_beginning_and_ending_in_one_step_or_twice_leaves_nothing(recorder):
    async def ask():
        async with serving(recorder) as repository:
            model = repository.model("recorder.push")
            one = await push(model, rows(0), 1, start=True, end=True)
            assert torch.equal(one, await push(model, rows(0), 1, start=True, end=True))
            found = await asyncio.gather(*(push(model, rows(0), 2, start=True, end=True) for _ in range(5)))
            assert all(torch.equal(one, each) for each in found)
            assert empty(repository)
            await push(model, rows(0), 3, start=True)
            ends = (push(model, rows(1), 3, end=True) for _ in range(3))
            answers = await asyncio.gather(*ends, return_exceptions=True)
            assert [type(each) for each in answers] == [torch.Tensor, SequenceError, SequenceError]
            assert empty(repository)

    run(ask())


@pytest.mark.parametrize("limit", ["most", "bytes"])
def test_of_many_that_begin_at_the_same_time_as_many_do_as_may(recorder, limit):
    with exportkit.load(recorder) as loaded:
        size = loaded.session(batch=2).state_bytes
    limits = SequenceLimits(most=5) if limit == "most" else SequenceLimits(most_bytes=5 * size + size // 2)

    async def ask():
        async with serving(recorder, limits=limits, runners=3) as repository:
            model = repository.model("recorder.push")
            for _ in range(3):
                starts = [push(model, rows(0), number, start=True) for number in range(1, 21)]
                found = await asyncio.gather(*starts, return_exceptions=True)
                assert sum(isinstance(each, torch.Tensor) for each in found) == 5
                assert sum(isinstance(each, QueueFullError) for each in found) == 15
                assert table(repository).state_bytes == 5 * size
                begun = [number for number, each in enumerate(found, 1) if isinstance(each, torch.Tensor)]
                await asyncio.gather(*(push(model, rows(1), number, end=True) for number in begun))
                assert empty(repository)

    run(ask())


def test_a_state_for_which_there_is_never_room_is_not_worth_another_try(recorder):
    async def ask():
        async with serving(recorder, limits=SequenceLimits(most_bytes=500)) as repository:
            model = repository.model("recorder.push")
            with pytest.raises(TooLargeError, match="would have 904 bytes, and all sequences may have 500") as refused:
                await push(model, rows(0, 8), 1, start=True)
            assert "--max-sequence-bytes" in refused.value.hint
            assert empty(repository)
            await push(model, rows(0), 1, start=True)

    run(ask())


def test_an_answer_that_is_lost_ends_its_sequence(recorder):
    async def ask():
        async with serving(recorder) as repository:
            model, whole = repository.model("recorder.push"), repository.named("recorder")
            for asked in (model, whole):
                await push(model, rows(0), 1, start=True)
                await push(model, rows(0), "1", start=True)
                asked.give_up(SequenceStep(1, owner="another key"))
                asked.give_up(SequenceStep(1))
                asked.give_up(SequenceStep(1))
                with pytest.raises(SequenceError, match="given up"):
                    await push(model, rows(0), 1)
                await push(model, rows(0), "1", end=True)
            repository.model("recorder.embed").give_up(SequenceStep(1))
            assert table(repository).ended == {"unanswered": 2, "end": 2}

    run(ask())


def test_what_begins_while_a_load_is_exchanged_begins_on_the_new_one(recorder, tmp_path):
    """Its request was accepted for the old one, which has no sequences any more and waits for its body."""
    file = tmp_path / "recorder.pt2"
    shutil.copy(recorder, file)

    async def ask():
        async with serving(repository=tmp_path, limits=SequenceLimits(finish_seconds=20.0)) as repository:
            old = repository.model("recorder.push")
            with old.admit(10):
                shutil.copy(recorder, file.with_suffix(".new"))
                file.with_suffix(".new").replace(file)
                await repository.load("recorder", {})
                new = repository.model("recorder.push")
                assert new is not old
                await asyncio.sleep(0.05)
                found = [await push(old, rows(0), 1, start=True)]
                assert table(repository).on(old.package) == 0
            while not old.package.closed:
                await asyncio.sleep(0.01)
            found.append(await push(new, rows(1), 1))
            found.append(await push(old, rows(2), 1, end=True))  # it was accepted before, too
            assert empty(repository)
            return found

    found = run(ask())
    with exportkit.load(recorder) as model, model.session(batch=2) as session:
        for number, answer in enumerate(found):
            assert torch.equal(answer, session.push(rows(number)))


@pytest.mark.parametrize("seed", range(3))
def test_whatever_clients_do_each_answer_is_of_its_own_state(recorder, seed):
    """They begin, go on, leave, come too late, send what is refused, and two keys use the same ids."""
    draw = random.Random(seed)

    async def client(repository: Repository, owner: str, each: Any, log: list[Any]) -> None:
        model = repository.model("recorder.push")
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

    async def ask():
        log: list[Any] = []
        async with serving(recorder, limits=SOON, runners=2) as repository:
            names = [(owner, each) for owner in ("a", "b") for each in (7, "7", 8)]
            await asyncio.gather(*(client(repository, *name, log) for name in names))
            while table(repository).count:
                await asyncio.sleep(0.05)
            assert empty(repository)
            model = repository.model("recorder.push")
            assert (model.counted.queued_rows, model.counted.queued_bytes, model.counted.pending) == (0, 0, 0)
        return log

    log = run(ask())
    assert len(log) > 50
    with exportkit.load(recorder) as model:
        for given, answer in log:
            with model.session(batch=2) as session:
                for x in given:
                    last = session.push(x)
            assert torch.equal(answer, last)


def test_the_state_is_counted_as_sessions_have_it(recorder: Path):
    async def ask():
        async with serving(recorder) as repository:
            model = repository.model("recorder.push")
            for count in range(1, 9):
                await push(model, rows(0, count), count, start=True)
            return [each.size for each in table(repository)._table]

    with exportkit.load(recorder) as model:
        sizes = []
        for count in range(1, 9):
            with model.session(batch=count) as session:
                sizes.append(sum(tensor.nbytes for tensor in session.state.values()))
                assert sizes[-1] == session.state_bytes
    assert run(ask()) == sizes
    assert sizes[0] == 4 * stateful.ROWS * stateful.WIDTH + 8 + 4 * stateful.WIDTH
