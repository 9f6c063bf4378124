"""The models, as a receiver sees them: every question goes to the process that has them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

from exportkit.serve.protocol.http_request import BodyRules
from exportkit.serve.protocol.inference import InferAnswer, InferRequest, InputTensor, OutputTensor
from exportkit.serve.receiving.body_memory import BodyMemory
from exportkit.serve.receiving.receiver_messages import (
    Answered,
    Ask,
    Forward,
    Forwarded,
    Freed,
    Granted,
    Infer,
    Leave,
    Message,
    More,
    Place,
    Refused,
    Room,
)

Send = Callable[[Message, Iterable[memoryview]], None]


class RemoteModels:
    """Asks, and hands out the answers. All methods are for the event loop's thread."""

    def __init__(self, send: Send, memory: BodyMemory) -> None:
        """`send` sends a message and the bytes behind it."""
        self._send = send
        self._memory = memory
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._read: dict[int, list[memoryview]] = {}  # what the models may read
        self._rules: dict[int, BodyRules] = {}  # by the serial number of the load

    async def find(self, name: str, version: str, size: int, reserved: ExitStack) -> RemoteRequest:
        """Returns a request for a model, with room for a body of `size` bytes until the stack is closed.

        Raises:
            ServeError: There is no such model. Whether there was room, `RemoteRequest.admit` says.
        """
        number = next(self._numbers)
        try:
            room: Room = (await self._ask(number, Ask(number, sendable(name), sendable(version), size)))[0]
        except asyncio.CancelledError:
            self.leave(number)
            raise
        request = RemoteRequest(self, room, self._rules[room.serial])
        reserved.callback(request.end)
        return request

    async def more(self, number: int, size: int) -> None:
        """Asks for more room for a request. Raises a ServeError if there is none."""
        await self._ask(number, More(number, size))

    def leave(self, number: int) -> None:
        """Gives the room of a request back that was not sent."""
        self._send(Leave(number), ())

    def places(self, inputs: Sequence[InputTensor]) -> tuple[tuple[Place, ...], list[memoryview]]:
        """Returns where inputs lie in the memory that the other process maps, and what keeps them there.

        Raises:
            QueueFullError: There is no room for an input that has to be copied there.
        """
        data = [self._shared(tensor.data) for tensor in inputs]
        places = [
            Place(tensor.name, tensor.datatype, tensor.shape, self._memory.offset_of(part) or 0, part.nbytes)
            for tensor, part in zip(inputs, data)
        ]
        return tuple(places), data

    async def infer(self, message: Infer, inputs: list[memoryview]) -> tuple[Answered, memoryview]:
        """Sends a request whose inputs lie here. Returns the answer, and the outputs' bytes."""
        self._read[message.number] = inputs
        try:
            answer: tuple[Answered, memoryview] = await self._ask(message.number, message)
        except asyncio.CancelledError:
            self.leave(message.number)
            raise
        return answer

    async def forward(self, scope: dict[str, Any], headers: Any, request_id: str, body: memoryview) -> Any:
        """Lets the other process answer a request. Returns `Forwarded`, and the body of the answer."""
        number = next(self._numbers)
        return await self._ask(number, Forward(number, scope, headers, request_id), [body])

    def received(self, message: Message, behind: memoryview) -> None:
        """Takes an answer."""
        if isinstance(message, Freed):
            self._read.pop(message.number, None)
            return
        assert isinstance(message, Room | Granted | Answered | Refused | Forwarded)
        if isinstance(message, Room) and message.rules is not None:
            rules = message.rules
            self._rules[message.serial] = BodyRules(rules.inputs, rules.outputs, rules.batched, rules.max_bytes)
        if not (isinstance(message, Refused) and message.reads):
            self._read.pop(message.number, None)
        answer = self._waiting.pop(message.number, None)
        if answer is None or answer.done():  # its client went away
            return
        if isinstance(message, Refused):
            answer.set_exception(message.error())
        else:
            answer.set_result((message, behind))

    def _ask(self, number: int, message: Message, behind: Iterable[memoryview] = ()) -> asyncio.Future[Any]:
        answer = self._waiting[number] = self._loop.create_future()
        self._send(message, behind)
        return answer

    def _shared(self, data: memoryview) -> memoryview:
        """Returns data in the memory that the other process maps: what came as JSON, or at an odd place, is copied."""
        if self._memory.offset_of(data) is not None:
            return data
        copy = self._memory.allocate(data.nbytes)
        copy[:] = data.cast("B")
        return copy


class RemoteRequest:
    """A request that has room, and the model that will answer it. To the endpoint it is a model."""

    def __init__(self, models: RemoteModels, room: Room, rules: BodyRules) -> None:
        self.name = room.model
        self.version = room.version
        self.body_rules = rules
        self._models = models
        self._number = room.number
        self._refused = room.refused
        self._over = room.refused is not None  # whether no room is left to be given back

    def admit(self, size: int) -> AbstractContextManager[None]:
        """Raises why there is no room, if there is none."""
        if self._refused is not None:
            raise self._refused.error()
        return nullcontext()

    async def admit_more(self, size: int) -> AbstractContextManager[None]:
        """As `ServedModel.admit_more`. The room is held until `end`."""
        await self._models.more(self._number, size)
        return nullcontext()

    async def infer(self, request: InferRequest) -> InferAnswer:
        """Answers the request. Raises what `ServedModel.infer` raises."""
        places, kept = self._models.places(request.inputs)
        self._over = True
        message = Infer(self._number, places, request.outputs, request.id, request.priority, request.timeout)
        answered, data = await self._models.infer(message, kept)
        outputs, start = [], 0
        for part in answered.outputs:
            outputs.append(OutputTensor(part.name, part.datatype, part.shape, data[start : start + part.size]))
            start += part.size
        return InferAnswer(self.name, self.version, request.id, tuple(outputs), answered.timing)

    def end(self) -> None:
        """Gives the room back. One that was sent to the model does that itself."""
        if not self._over:
            self._models.leave(self._number)


def sendable(text: str) -> str:
    """Returns what a client wrote, without what UTF-8 has no bytes for."""
    return text.encode(errors="replace").decode()
