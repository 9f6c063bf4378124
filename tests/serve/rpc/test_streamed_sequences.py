"""Steps in streams have the bits of a session of their own, in their order, whatever happens beside."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import exportkit
from exportkit.serve.rpc import http2_frames as h2
from exportkit.serve.sequences.table import SequenceLimits
from tests.serve.engine import ticker
from tests.serve.rpc.played_streams import Connection, Played, expected, played, step, tensor_of
from tests.serve.rpc.raw_http2 import prefixed


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ticker.write(tmp_path_factory.mktemp("ticker") / "ticker.pt2")


@pytest.fixture(scope="module")
def alone(package: Path) -> Iterator[Any]:
    with exportkit.load(package) as model:
        yield model


@pytest.fixture(scope="module")
def served(package: Path) -> Iterator[tuple[asyncio.Runner, Played]]:
    with asyncio.Runner() as runner:
        server = runner.run(played(package))
        yield runner, server
        runner.run(server.close())


FRESH = itertools.count(1000)


def begun(connection: Connection, call: int, *ids: int | str) -> None:
    """Begins sequences, and sends a second step of each."""
    for sequence in ids:
        connection.put(call, step(sequence, 0, sequence_start=True))
    for sequence in ids:
        connection.put(call, step(sequence, 1))
    connection.arrive()


Plan = list[tuple[int, int, str]]
KINDS = ["step"] * 12 + ["two", "restart", "end", "unknown", "slow", "priority", "pause", "order", "text"]
plans = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4000), st.sampled_from(KINDS)), min_size=10, max_size=80)


class Play:
    """Plays a plan: six sequences on three calls of two connections."""

    def __init__(self, server: Played, plan: Plan, names: list[int | str]) -> None:
        self._server, self._plan, self._names = server, plan, names
        self.seeds: dict[tuple[int, int], list[int]] = defaultdict(list)  # of a sequence's n-th life
        self.lives = [0] * 6
        self.asked: dict[int, list[tuple[int, int] | None]] = defaultdict(list)  # by call
        self.found: dict[int, list[Any]] = {}

    async def run(self) -> Play:
        connections = [Connection(self._server.server) for _ in range(2)]
        calls = [(connections[0], connections[0].call()), (connections[0], connections[0].call())]
        calls.append((connections[1], connections[1].call()))
        ended = [True] * 6
        for number, (which, cut, kind) in enumerate(self._plan):
            place = which % 3
            connection, call = calls[place]
            more: dict[str, Any] = {}
            rows = 1 + (which == 5)
            if kind == "restart" or ended[which]:
                self.lives[which] += 1
                more["sequence_start"] = True
            life: tuple[int, int] | None = (which, self.lives[which])
            ended[which] = kind == "end"
            if kind in ("restart", "end", "order"):
                more.update(sequence_end=kind == "end", sequence_start=more.get("sequence_start", False))
            more.update(
                {"slow": {"timeout": 10**9}, "priority": {"priority": 1}, "text": {"own": "text"}}.get(kind, {})
            )
            sequence = self._names[which]
            if kind == "unknown":
                sequence, life = "nobody", None
                more.pop("sequence_start", None)
                ended[which] = ended[which] or self.lives[which] == 0 or not self.seeds[which, self.lives[which]]
                if not self.seeds[which, self.lives[which]]:
                    self.lives[which] -= 1
            messages = [step(sequence, number, rows=rows, id=f"{number}", **more)]
            self.asked[place].append(life)
            if life is not None:
                self.seeds[life].append(number)
            if kind == "two" and life is not None:
                messages.append(step(sequence, number + 500, rows=rows, id=f"{number}b"))
                self.asked[place].append(life)
                self.seeds[life].append(number + 500)
            connection.put(call, *messages)
            if cut % 3:
                connection.arrive(*([cut, cut // 7] if cut % 2 else []))
            if kind == "pause":
                await asyncio.sleep(0.003)
            elif cut % 5 == 0:
                await asyncio.sleep(0)
        for each in connections:
            each.arrive()
        for place, (connection, call) in enumerate(calls):
            self.found[place] = await connection.until(call, len(self.asked[place]))
            assert len(self.found[place]) == len(self.asked[place])
        for each in connections:
            each.protocol.connection_lost(None)
        await self._server.settled()
        return self


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plans)
def test_any_plan_is_answered_as_by_sessions_of_their_own(served, alone, plan: Plan):
    runner, server = served
    names: list[int | str] = [next(FRESH) if which % 2 else f"s{next(FRESH)}" for which in range(6)]
    play = runner.run(Play(server, plan, names).run())
    answers: dict[tuple[int, int], list[torch.Tensor]] = defaultdict(list)
    for place, asked in play.asked.items():
        for life, answer in zip(asked, play.found[place]):
            if life is None:
                assert "nobody" in answer.error_message
            else:
                assert not answer.error_message, answer.error_message
                answers[life].append(tensor_of(answer))
    for life, tensors in answers.items():
        for mine, theirs in zip(tensors, expected(alone, 1 + (life[0] == 5), play.seeds[life]), strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("seed", range(4))
def test_clients_that_leave_hurt_nobody_else(served, alone, seed: int):
    runner, server = served
    chance = random.Random(seed)

    async def ask() -> None:
        staying = Connection(server.server)
        own = staying.call()
        ids = [next(FRESH) for _ in range(5)]
        begun(staying, own, *ids)
        count = 10
        for number in range(2, 30):
            leaving = Connection(server.server)
            call, others = leaving.call(), [next(FRESH) for _ in range(3)]
            begun(leaving, call, *others)
            if chance.random() < 0.5:
                await leaving.until(call, 6)
            for sequence in others * chance.randrange(1, 4):
                leaving.put(call, step(sequence, number))
            for sequence in ids:
                staying.put(own, step(sequence, number))
            count += 5
            leaving.arrive()
            staying.arrive()
            if chance.random() < 0.5:
                await asyncio.sleep(chance.choice([0, 0.002]))
            if chance.random() < 0.5:
                leaving.put_frame(h2.reset(call, h2.ErrorCode.CANCEL))
                leaving.arrive()
            leaving.protocol.connection_lost(None)
        found = await staying.until(own, count)
        for which, sequence in enumerate(ids):
            mine = [tensor_of(found[which]), *(tensor_of(each) for each in found[5 + which :: 5])]
            theirs = expected(alone, 1, list(range(30)))
            assert len(mine) == len(theirs), sequence
            assert all(map(torch.equal, mine, theirs))
        staying.protocol.connection_lost(None)
        await server.settled()

    runner.run(ask())


def test_a_client_whose_window_is_full_gets_all_answers_in_their_order(served, alone):
    runner, server = served

    async def ask() -> list[Any]:
        connection = Connection(server.server, window=700)
        call, sequence = connection.call(), next(FRESH)
        begun(connection, call, sequence)
        connection.put_frame(h2.window_update(call, 700))
        for number in range(2, 40):
            connection.put(call, step(sequence, number, id=f"{number}"))
            connection.arrive()
            if number % 8 == 0:
                await asyncio.sleep(0.003)
            if number % 4 == 0:
                connection.put_frame(h2.window_update(call, 1000))
        for _ in range(40):
            connection.put_frame(h2.window_update(call, 1000))
            connection.arrive()
            await asyncio.sleep(0)
        found = await connection.until(call, 40)
        connection.protocol.connection_lost(None)
        await server.settled()
        return found

    found = runner.run(ask())
    assert [each.infer_response.id for each in found[2:]] == [f"{number}" for number in range(2, 40)]
    for mine, theirs in zip(found, expected(alone, 1, list(range(40))), strict=True):
        assert torch.equal(tensor_of(mine), theirs)


def test_steps_of_a_stream_wait_however_many_rows_do(package: Path, alone):
    async def ask() -> list[Any]:
        server = await played(package, delay=0.02, limits=SequenceLimits(most=8), queued=8)
        connection = Connection(server.server)
        call = connection.call()
        for number in range(4):
            connection.put(call, step(1 + number % 2, number // 2, rows=5, sequence_start=number < 2))
        connection.arrive()
        await connection.until(call, 4)
        for number in range(2, 700):
            connection.put(call, step(1 + number % 2, number, rows=5))
        connection.put(call, step(3, 0, sequence_start=True))
        connection.arrive()
        found = await connection.until(call, 703)
        await server.settled()
        await server.close()
        return found

    found = asyncio.run(asyncio.wait_for(ask(), 100))
    assert torch.equal(tensor_of(found.pop()), *expected(alone, 1, [0]))
    for which in range(2):
        mine = [found[which], found[2 + which], *found[4 + which :: 2]]
        seeds = [0, 1, *range(2 + which, 700, 2)]
        assert all(map(torch.equal, map(tensor_of, mine), expected(alone, 5, seeds)))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 255)), max_size=6),
    st.lists(st.integers(0, 5000), max_size=4),
)
def test_damaged_frames_break_their_connection_alone(served, changes: list[tuple[int, int]], cuts: list[int]):
    runner, server = served

    async def ask() -> None:
        connection = Connection(server.server)
        call, sequence = connection.call(), next(FRESH)
        begun(connection, call, sequence)
        await connection.until(call, 2)
        data = bytearray(b"".join(h2.frame(h2.DATA, 0, call, prefixed(step(sequence, number))) for number in range(4)))
        for place, byte in changes:
            data[place % len(data)] = byte
        connection.put_frame(bytes(data))
        connection.arrive(*cuts)
        await asyncio.sleep(0.002)
        connection.protocol.connection_lost(None)
        await server.settled()

    runner.run(ask())
