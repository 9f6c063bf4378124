"""Answers one receiver, in the process that has the models."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from starlette.types import ASGIApp

from exportkit.serve.engine.repository import Repository
from exportkit.serve.engine.served import ServedModel
from exportkit.serve.protocol.inference import InferRequest, InputTensor
from exportkit.serve.receiving.body_memory import MappedMemory
from exportkit.serve.receiving.receiver_messages import (
    Answered,
    Ask,
    Counted,
    Forward,
    Forwarded,
    Freed,
    FromReceiver,
    Granted,
    Infer,
    Leave,
    More,
    Part,
    Refused,
    Room,
    Rules,
)
from exportkit.serve.request_record import RequestRecord
from exportkit.serve.statuses import CancelledError


@dataclass
class _Request:
    """A request that has room."""

    model: ServedModel
    room: ExitStack
    inputs: list[np.ndarray] = field(default_factory=list)
    task: asyncio.Task[None] | None = None


class Answering:
    """Answers the messages of one receiver. All methods are for the event loop's thread."""

    def __init__(
        self,
        repository: Repository,
        application: ASGIApp,
        memory: MappedMemory,
        send: Callable[..., None],
        counted: Callable[[Counted], None],
    ) -> None:
        """Nothing was asked.

        Args:
            repository: The models.
            application: Answers every URL but inferences.
            memory: Has the bodies.
            send: Sends a message and the bytes behind it.
            counted: Gets what the receiver counts.
        """
        self._repository = repository
        self._application = application
        self._memory = memory
        self._send = send
        self._counted = counted
        self._loop = asyncio.get_running_loop()
        self._requests: dict[int, _Request] = {}
        self._forwarding: set[asyncio.Task[None]] = set()
        self._told: set[int] = set()  # the loads whose rules the receiver knows

    def received(self, message: FromReceiver, behind: memoryview) -> None:
        """Takes a message."""
        if isinstance(message, Ask):
            self._ask(message)
        elif isinstance(message, More):
            self._more(message)
        elif isinstance(message, Infer):
            self._infer(message)
        elif isinstance(message, Leave):
            self._leave(message.number)
        elif isinstance(message, Counted):
            self._counted(message)
        elif isinstance(message, Forward):
            task = self._loop.create_task(self._forward(message, behind))
            self._forwarding.add(task)
            task.add_done_callback(self._forwarding.discard)

    def ended(self) -> None:
        """The receiver is gone, and with it the clients of its requests."""
        for number in list(self._requests):
            self._leave(number)
        for task in self._forwarding:
            task.cancel()

    def _ask(self, asked: Ask) -> None:
        try:
            model = self._repository.model(asked.model, asked.version)
        except Exception as error:
            self._send(Refused.of(asked.number, error))
            return
        refused, room = None, ExitStack()
        try:
            room.enter_context(model.admit(asked.size))
            self._requests[asked.number] = _Request(model, room)
        except Exception as error:
            refused = Refused.of(asked.number, error)
        self._send(Room(asked.number, model.name, model.version, model.serial, self._new_rules(model), refused))

    def _new_rules(self, model: ServedModel) -> Rules | None:
        """Returns the rules of a load that the receiver has not heard of."""
        if model.serial in self._told:
            return None
        self._told.add(model.serial)
        known = model.body_rules
        return Rules(list(map(dict, known.inputs)), list(map(dict, known.outputs)), known.batched, known.max_bytes)

    def _more(self, asked: More) -> None:
        request = self._requests[asked.number]
        try:
            request.room.enter_context(request.model.admit(asked.size))
        except Exception as error:
            self._send(Refused.of(asked.number, error))
            return
        self._send(Granted(asked.number))

    def _leave(self, number: int) -> None:
        request = self._requests.get(number)
        if request is None:  # it was answered meanwhile
            return
        if request.task is not None:
            request.task.cancel()
            return
        del self._requests[number]
        request.room.close()

    def _infer(self, message: Infer) -> None:
        request = self._requests[message.number]
        request.inputs = [self._memory.view(place.offset, place.size) for place in message.inputs]
        request.task = self._loop.create_task(self._answer(request, message))
        request.task.add_done_callback(partial(self._over, message.number))

    async def _answer(self, request: _Request, message: Infer) -> None:
        inputs = tuple(
            InputTensor(place.name, place.datatype, place.shape, part.data)
            for place, part in zip(message.inputs, request.inputs)
        )
        asked = InferRequest(inputs, message.outputs, message.id, message.priority, message.timeout)
        answer = await request.model.infer(asked)
        parts = tuple(Part(each.name, each.datatype, each.shape, each.data.nbytes) for each in answer.outputs)
        self._send(Answered(message.number, parts, answer.timing), [each.data for each in answer.outputs])

    def _over(self, number: int, task: asyncio.Task[None]) -> None:
        """A request was answered, or is refused now. A task that is cancelled before it begins ends here, too."""
        request = self._requests.pop(number)
        request.task = None  # whose error has the frame that has the request: a circle, which would keep the inputs
        request.room.close()
        error = CancelledError("the client went away") if task.cancelled() else task.exception()
        if error is not None:  # the receiver knows which request it was, and logs what nobody expected
            self._refuse(number, error, request.inputs)

    def _refuse(self, number: int, error: BaseException, inputs: list[np.ndarray]) -> None:
        """Refuses a request. A batch that it is in may still run, and read its inputs."""
        self._send(Refused.of(number, error, reads=bool(inputs)))
        left = len(inputs)

        def freed() -> None:
            nonlocal left
            left -= 1
            if not left:
                self._send(Freed(number))

        for part in inputs:
            weakref.finalize(part, self._soon, freed)

    def _soon(self, function: Callable[[], None]) -> None:
        """Calls a function in the event loop. Any thread may call this: the last reference may be a runner's."""
        with suppress(RuntimeError):  # the loop was closed, so nobody waits
            self._loop.call_soon_threadsafe(function)

    async def _forward(self, message: Forward, body: memoryview) -> None:
        record = RequestRecord(id=message.request_id)
        scope = {"type": "http", "headers": message.headers, "exportkit": record, **message.scope}
        sent = _Sent()
        try:
            await self._application(scope, _Body(bytes(body)).receive, sent.send)
        except Exception as error:
            self._send(Refused.of(message.number, error))
            return
        answer = Forwarded(message.number, sent.status, sent.headers, record.error)
        self._send(answer, [memoryview(part) for part in sent.body])


class _Body:
    """ASGI's `receive` of a body that is there."""

    def __init__(self, body: bytes) -> None:
        self._messages: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive(self) -> dict[str, Any]:
        return self._messages.pop() if self._messages else {"type": "http.disconnect"}


class _Sent:
    """ASGI's `send`, which keeps the answer."""

    def __init__(self) -> None:
        self.status = 500
        self.headers: list[tuple[bytes, bytes]] = []
        self.body: list[bytes] = []

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], list(message.get("headers", ()))
        else:
            self.body.append(bytes(message.get("body", b"")))
