"""A receiver's requests: room is given back, memory is used again only when no model reads it, rules are told once."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import numpy as np
import pytest

from exportkit.serve.http.exchange import HttpOptions
from exportkit.serve.protocol.inference import InferRequest, InputTensor, OutputTensor
from exportkit.serve.receiving.forwarding import receiver_app
from exportkit.serve.receiving.receiver_messages import (
    AdmissionAnswer,
    AdmissionRequest,
    Cancel,
    Forward,
    Forwarded,
    InputsReleased,
    Submission,
)
from exportkit.serve.receiving.remote_models import RemoteAdmission
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


async def found(pair: Loopback, reserved: AsyncExitStack, size: int = SIZE) -> RemoteAdmission:
    return await reserved.enter_async_context(pair.models.open("m", "", size))


async def until(happened: Any) -> None:
    while not happened():
        await asyncio.sleep(0)


def test_memory_is_not_used_again_while_a_refused_request_is_read() -> None:
    async def refuse() -> None:
        model = Reading()
        pair = Loopback(FakeRepository(model))
        async with AsyncExitStack() as reserved:
            remote = await found(pair, reserved)
            with pytest.raises(DeadlineError, match="too late"):
                await remote.infer(request(pair, 7))
        held = pair.memory.allocate(SIZE)
        held[:] = bytes(SIZE)
        assert set(bytes(model.read[0].inputs[0].data)) == {7}
        model.read.clear()
        await until(lambda: any(isinstance(each, InputsReleased) for each in pair.said))
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
        async with AsyncExitStack() as reserved:
            remote = await found(pair, reserved)
            waiting = asyncio.ensure_future(remote.infer(request(pair)))
            await until(lambda: model.waiting == 1)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        await until(lambda: model.held == 0)
        assert model.cancelled == 1
        await until(lambda: any(isinstance(each, InputsReleased) for each in pair.said))
        pair.close()

    asyncio.run(leave())


def test_a_client_that_leaves_at_once_leaves_nothing_behind() -> None:
    """Its request and the news of its end arrive together, before the request is looked at."""

    async def leave() -> None:
        model = FakeModel("m", {"x": ("UINT8", [-1])}, SIZE)
        pair = Loopback(FakeRepository(model))
        async with AsyncExitStack() as reserved:
            remote = await found(pair, reserved)
            room = next(message for message in pair.said if isinstance(message, AdmissionAnswer))
            submission, _ = pair.models.place(room.number, request(pair))
            remote._has_room = False
        pair.session.received(submission, memoryview(b""))
        pair.session.received(Cancel(room.number), memoryview(b""))
        await until(lambda: any(isinstance(each, InputsReleased) for each in pair.said))
        assert model.held == 0
        assert model.answered == 0
        pair.close()

    asyncio.run(leave())


def test_a_receiver_that_dies_leaves_nothing_behind() -> None:
    async def die() -> None:
        model = FakeModel("m", {"x": ("UINT8", [-1])}, SIZE)
        pair = Loopback(FakeRepository(model))
        model.hold()
        reserved = AsyncExitStack()
        await found(pair, reserved)  # whose body does not come
        remote = await found(pair, reserved)
        waiting = asyncio.ensure_future(remote.infer(request(pair)))
        await until(lambda: model.waiting == 1)
        assert model.held == 2 * SIZE
        pair.session.ended()
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
        async with AsyncExitStack() as reserved:
            remote = await found(pair, reserved, 100)
            await remote.grow(50)
            assert model.held == 150
            model.room = 160
            with pytest.raises(QueueFullError):
                await remote.grow(50)
            full = await found(pair, reserved, 50)
            assert isinstance(full.refused, QueueFullError)
        await until(lambda: model.held == 0)
        with pytest.raises(NotServedError):
            await pair.models.open("\udcff", "", 0).__aenter__()
        asking = asyncio.ensure_future(found(pair, AsyncExitStack(), 100))
        await until(lambda: model.held == 100)
        asking.cancel()  # before it hears of its room
        await until(lambda: model.held == 0)
        pair.close()

    asyncio.run(ask())


def test_rules_are_told_once_for_each_load() -> None:
    async def ask() -> list[Any]:
        repository = FakeRepository(FakeModel("m", {"x": ("UINT8", [-1])}, SIZE))
        pair = Loopback(repository)
        async with AsyncExitStack() as reserved:
            first = [await found(pair, reserved) for _ in range(2)]
            repository._models["m"] = FakeModel("m", {"y": ("FP32", [-1, 3])}, 3 * SIZE)
            second = [await found(pair, reserved) for _ in range(2)]
        assert [each.body_rules.inputs[0]["name"] for each in (*first, *second)] == ["x", "x", "y", "y"]
        assert second[1].body_rules == repository.model("m").body_rules
        pair.close()
        return pair.said

    rooms = [message for message in asyncio.run(ask()) if isinstance(message, AdmissionAnswer)]
    assert [room.rules is not None for room in rooms] == [True, False, True, False]


def test_inputs_that_lie_elsewhere_are_copied_to_where_the_model_can_read_them() -> None:
    async def ask() -> None:
        model = FakeModel("m", {"a": ("UINT8", [-1]), "b": ("FP32", [-1])}, SIZE, echo)
        pair = Loopback(FakeRepository(model))
        tensors = (
            InputTensor("a", "UINT8", (3,), memoryview(b"abc")),
            InputTensor("b", "FP32", (0,), memoryview(b"")),
        )
        async with AsyncExitStack() as reserved:
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


def test_a_forwarded_request_is_what_this_process_says_it_is() -> None:
    """A receiver that was taken over chooses no other kind of request, and writes in no record but its own."""

    async def ask() -> None:
        pair = Loopback(FakeRepository(FakeModel("m", {"x": ("UINT8", [-1])}, SIZE)))
        record: Any = []
        about = {
            "type": "lifespan",
            "exportkit": record,
            "http_version": "1.1",
            "method": "GET",
            "scheme": "http",
            "path": "/v2",
            "raw_path": b"/v2",
            "query_string": b"",
            "root_path": "",
            "client": None,
            "server": None,
        }
        headers = [(b"host", b"x")]
        pair.session.received(Forward(1, about, headers, "mine"), memoryview(b""))
        await until(lambda: any(isinstance(each, Forwarded) for each in pair.said))
        answer = next(each for each in pair.said if isinstance(each, Forwarded))
        assert answer.status == 200
        assert (b"x-request-id", b"mine") in answer.headers
        pair.close()

    asyncio.run(ask())


def test_a_request_that_nobody_admitted_is_refused() -> None:
    async def ask() -> None:
        model = FakeModel("m", {"x": ("UINT8", [-1])}, SIZE)
        pair = Loopback(FakeRepository(model))
        submission, _ = pair.models.place(1, request(pair))
        with pytest.raises(KeyError):
            pair.session.received(submission, memoryview(b""))
        pair.session.received(AdmissionRequest(1, "m", "", 10), memoryview(b""))
        with pytest.raises(ValueError, match="is there already"):
            pair.session.received(AdmissionRequest(1, "m", "", 10), memoryview(b""))
        with pytest.raises(ValueError, match="not as a whole"):
            pair.session.received(Submission(1, submission.request, ()), memoryview(b""))
        assert model.held == 10
        pair.close()

    asyncio.run(ask())
