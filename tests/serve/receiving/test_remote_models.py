"""A receiver's requests: room is given back, memory is used again only when no model reads it, rules are told once."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from exportkit.serve.http.exchange import HttpOptions
from exportkit.serve.protocol.inference import InferRequest, InputTensor, OutputTensor
from exportkit.serve.receiving.forwarding import receiver_app
from exportkit.serve.receiving.receiver_messages import Freed, Infer, Leave, Room
from exportkit.serve.receiving.remote_models import RemoteRequest
from exportkit.serve.statuses import CancelledError, DeadlineError, NotServedError, QueueFullError
from tests.serve.http.asking import asked, infer_body
from tests.serve.http.doubles import FakeModel, FakeRepository, echo
from tests.serve.receiving.loopback import Loopback

SIZE = 1 << 20


class Reading(FakeModel):
    """A model that goes on reading requests that it has refused, as a batch does that runs."""

    def __init__(self) -> None:
        super().__init__("m", {"x": ("UINT8", [-1])}, SIZE, self._refuse)
        self.read: list[InferRequest] = []

    def _refuse(self, request: InferRequest) -> list[OutputTensor]:
        self.read.append(request)
        raise DeadlineError("too late")


def request(pair: Loopback, value: int = 0) -> InferRequest:
    data = pair.memory.allocate(SIZE)
    np.frombuffer(data, np.uint8)[:] = value
    return InferRequest((InputTensor("x", "UINT8", (SIZE,), data),))


async def found(pair: Loopback, reserved: ExitStack, size: int = SIZE) -> RemoteRequest:
    return await pair.models.find("m", "", size, reserved)


async def until(happened: Any) -> None:
    while not happened():
        await asyncio.sleep(0)


def test_memory_is_not_used_again_while_a_refused_request_is_read() -> None:
    async def refuse() -> None:
        model = Reading()
        pair = Loopback(FakeRepository(model))
        with ExitStack() as reserved:
            remote = await found(pair, reserved)
            with pytest.raises(DeadlineError, match="too late"):
                await remote.infer(request(pair, 7))
        held = pair.memory.allocate(SIZE)
        held[:] = bytes(SIZE)
        assert set(bytes(model.read[0].inputs[0].data)) == {7}
        model.read.clear()
        await until(lambda: any(isinstance(each, Freed) for each in pair.said))
        await asyncio.sleep(0)
        assert pair.memory.offset_of(pair.memory.allocate(SIZE)) == 0
        assert model.held == 0
        pair.close()

    asyncio.run(refuse())


def test_a_client_that_leaves_takes_its_request_out_of_the_queue() -> None:
    async def leave() -> None:
        model = FakeModel("m", {"x": ("UINT8", [-1])}, SIZE)
        pair = Loopback(FakeRepository(model))
        model.hold()
        with ExitStack() as reserved:
            remote = await found(pair, reserved)
            waiting = asyncio.ensure_future(remote.infer(request(pair)))
            await until(lambda: model.waiting == 1)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        await until(lambda: model.held == 0)
        assert model.cancelled == 1
        await until(lambda: any(isinstance(each, Freed) for each in pair.said))
        pair.close()

    asyncio.run(leave())


def test_a_client_that_leaves_at_once_leaves_nothing_behind() -> None:
    """Its request and the news of its end arrive together, before the request is looked at."""

    async def leave() -> None:
        model = FakeModel("m", {"x": ("UINT8", [-1])}, SIZE)
        pair = Loopback(FakeRepository(model))
        with ExitStack() as reserved:
            remote = await found(pair, reserved)
            places, _ = pair.models.places(request(pair).inputs)
            remote._over = True
        room = next(message for message in pair.said if isinstance(message, Room))
        pair.answering.received(Infer(room.number, places, None, "", 0, None), memoryview(b""))
        pair.answering.received(Leave(room.number), memoryview(b""))
        await until(lambda: any(isinstance(each, Freed) for each in pair.said))
        assert model.held == 0
        assert model.answered == 0
        pair.close()

    asyncio.run(leave())


def test_a_receiver_that_dies_leaves_nothing_behind() -> None:
    async def die() -> None:
        model = FakeModel("m", {"x": ("UINT8", [-1])}, SIZE)
        pair = Loopback(FakeRepository(model))
        model.hold()
        reserved = ExitStack()
        await found(pair, reserved)  # whose body does not come
        remote = await found(pair, reserved)
        waiting = asyncio.ensure_future(remote.infer(request(pair)))
        await until(lambda: model.waiting == 1)
        assert model.held == 2 * SIZE
        pair.answering.ended()
        await until(lambda: model.held == 0)
        assert model.cancelled == 1
        with pytest.raises(CancelledError):
            await waiting
        pair.close()

    asyncio.run(die())


def test_room_that_nobody_uses_is_given_back() -> None:
    async def ask() -> None:
        model = FakeModel("m", {"x": ("UINT8", [-1])}, SIZE)
        pair = Loopback(FakeRepository(model))
        with ExitStack() as reserved:
            remote = await found(pair, reserved, 100)
            remote.admit(100)
            await remote.admit_more(50)
            assert model.held == 150
            model.room = 160
            with pytest.raises(QueueFullError):
                await remote.admit_more(50)
            full = await found(pair, reserved, 50)
            with pytest.raises(QueueFullError):
                full.admit(50)
        await until(lambda: model.held == 0)
        with ExitStack() as reserved, pytest.raises(NotServedError):
            await pair.models.find("\udcff", "", 0, reserved)
        asking = asyncio.ensure_future(found(pair, ExitStack(), 100))
        await until(lambda: model.held == 100)
        asking.cancel()  # before it hears of its room
        await until(lambda: model.held == 0)
        pair.close()

    asyncio.run(ask())


def test_rules_are_told_once_for_each_load() -> None:
    async def ask() -> list[Any]:
        repository = FakeRepository(FakeModel("m", {"x": ("UINT8", [-1])}, SIZE))
        pair = Loopback(repository)
        with ExitStack() as reserved:
            first = [await found(pair, reserved) for _ in range(2)]
            repository._models["m"] = FakeModel("m", {"y": ("FP32", [-1, 3])}, 3 * SIZE)
            second = [await found(pair, reserved) for _ in range(2)]
        assert [each.body_rules.inputs[0]["name"] for each in (*first, *second)] == ["x", "x", "y", "y"]
        assert second[1].body_rules == repository.model("m").body_rules
        pair.close()
        return pair.said

    rooms = [message for message in asyncio.run(ask()) if isinstance(message, Room)]
    assert [room.rules is not None for room in rooms] == [True, False, True, False]


def test_inputs_that_lie_elsewhere_are_copied_to_where_the_model_can_read_them() -> None:
    async def ask() -> None:
        model = FakeModel("m", {"a": ("UINT8", [-1]), "b": ("FP32", [-1])}, SIZE, echo)
        pair = Loopback(FakeRepository(model))
        tensors = (
            InputTensor("a", "UINT8", (3,), memoryview(b"abc")),
            InputTensor("b", "FP32", (0,), memoryview(b"")),
        )
        with ExitStack() as reserved:
            answer = await (await found(pair, reserved)).infer(InferRequest(tensors, id="7"))
        assert [(each.name, bytes(each.data)) for each in answer.outputs] == [("a", b"abc"), ("b", b"")]
        assert answer.id == "7"
        pair.close()

    asyncio.run(ask())


@pytest.mark.parametrize(("name", "status"), [("x", 200), ("y", 400)])
def test_a_body_is_forgotten_before_its_answer_is_sent(name: str, status: int) -> None:
    async def ask() -> None:
        def forget(request: InferRequest) -> list[OutputTensor]:
            return [OutputTensor("x", "UINT8", (1,), memoryview(b"x"))]

        pair = Loopback(FakeRepository(FakeModel("m", {"x": ("UINT8", [-1])}, SIZE, forget)))
        app = receiver_app(pair.models, HttpOptions(allocate=pair.memory.allocate))
        body, headers = infer_body((name, "UINT8", [SIZE], bytes(SIZE)))
        used: list[int] = []

        def begins() -> None:
            pair.memory.tidy()
            used.append(pair.memory._parts.used)

        reply = await asked(app, "POST", "/v2/models/m/infer", body, headers, begins=begins)
        assert reply.status == status, reply.body
        if status == 200:
            assert used == [0]
        await until(lambda: (pair.memory.tidy(), pair.memory._parts.used == 0)[1])
        pair.close()

    asyncio.run(ask())
