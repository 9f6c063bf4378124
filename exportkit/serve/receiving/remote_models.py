"""The models, as a receiver sees them: every question goes to the process that has them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

from msgspec.structs import replace

from exportkit.serve.protocol.http_request import BodyRules
from exportkit.serve.protocol.inference import InferAnswer, InferRequest, SequenceStart, SequenceStep
from exportkit.serve.receiving.body_memory import BodyMemory
from exportkit.serve.receiving.receiver_messages import (
    AdmissionAnswer,
    AdmissionRequest,
    Cancel,
    Forward,
    Forwarded,
    GiveUp,
    GrowRequest,
    InputsReleased,
    Place,
    ReceiverMessage,
    Refused,
    StartRequest,
    Submission,
    ToAsker,
)
from exportkit.serve.request_record import RequestRecord

Send = Callable[[ReceiverMessage, Iterable[memoryview]], None]

_NOTHING = memoryview(b"")


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

    def open(self, name: str, version: str, size: int, client: str = "") -> RemoteAdmission:
        """Asks for a model and for room: see exportkit.serve.protocol.admission.Open."""
        number = next(self._numbers)
        return RemoteAdmission(self, AdmissionRequest(number, sendable(name), sendable(version), size, client))

    async def ask(self, message: AdmissionRequest | GrowRequest | StartRequest) -> Any:
        """Returns the answer. Raises a ServeError if there is none."""
        return (await self._answer(message.number, message))[0]

    def rules(self, serial: int) -> BodyRules:
        """Returns the rules of a load that was named in an answer."""
        return self._rules[serial]

    def cancel(self, number: int) -> None:
        """Gives the room of a request back, and takes one that was sent out of the queue."""
        self._send(Cancel(number), ())

    def give_up(self, message: GiveUp) -> None:
        """Ends a sequence whose answer cannot be written."""
        self._send(message, ())

    def place(self, number: int, request: InferRequest) -> tuple[Submission, list[memoryview]]:
        """Returns a request as it is sent, and what keeps its inputs where they lie.

        Raises:
            QueueFullError: There is no room for an input that has to be copied there.
        """
        data = [self._shared(tensor.data) for tensor in request.inputs]
        places = tuple(Place(self._memory.offset_of(part) or 0, part.nbytes) for part in data)
        inputs = tuple(replace(tensor, data=_NOTHING) for tensor in request.inputs)
        return Submission(number, replace(request, inputs=inputs), places), data

    async def submit(self, submission: Submission, inputs: list[memoryview]) -> InferAnswer:
        """Sends a request for which there is room, and returns its answer. Raises a ServeError if there is none."""
        self._read[submission.number] = inputs
        try:
            answered, behind = await self._answer(submission.number, submission)
        except asyncio.CancelledError:
            self.cancel(submission.number)
            raise
        ends = itertools.accumulate(answered.sizes)
        outputs = tuple(
            replace(output, data=behind[end - size : end])
            for output, size, end in zip(answered.answer.outputs, answered.sizes, ends)
        )
        return replace(answered.answer, outputs=outputs)

    async def forward(
        self, scope: dict[str, Any], headers: Any, record: RequestRecord, body: memoryview
    ) -> tuple[Forwarded, memoryview]:
        """Lets the other process answer a request. Returns the answer, and its body."""
        number = next(self._numbers)
        return await self._answer(number, Forward(number, scope, headers, record.id, record.client), [body])

    def received(self, message: ToAsker, behind: memoryview) -> None:
        """Takes an answer."""
        if isinstance(message, InputsReleased):
            self._read.pop(message.number, None)
            return
        if isinstance(message, AdmissionAnswer) and message.rules is not None:
            self._rules[message.serial] = message.rules
        if not (isinstance(message, Refused) and message.reads):
            self._read.pop(message.number, None)
        answer = self._waiting.pop(message.number, None)
        if answer is None or answer.done():  # its client went away
            return
        if isinstance(message, Refused):
            answer.set_exception(message.error())
        else:
            answer.set_result((message, behind))

    def _answer(self, number: int, message: ReceiverMessage, behind: Iterable[memoryview] = ()) -> asyncio.Future[Any]:
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


class RemoteAdmission:
    """A request for a model of the other process: an `Admitted`, and its context."""

    def __init__(self, models: RemoteModels, asked: AdmissionRequest) -> None:
        """Nothing was asked yet."""
        self._models = models
        self._asked = asked
        self._has_room = False

    async def __aenter__(self) -> RemoteAdmission:
        """Reserves the room."""
        try:
            answer: AdmissionAnswer = await self._models.ask(self._asked)
        except asyncio.CancelledError:
            self._models.cancel(self._asked.number)
            raise
        self.name, self.version = answer.model, answer.version
        self.body_rules = self._models.rules(answer.serial)
        self.refused: Any = None if answer.refused is None else answer.refused.error()
        self._has_room = self.refused is None
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Gives the room back, unless the request was sent to the model, which does that itself."""
        if self._has_room:
            self._models.cancel(self._asked.number)

    async def grow(self, size: int) -> None:
        """Makes room for more."""
        await self._models.ask(GrowRequest(self._asked.number, size))

    async def check_start(self, start: SequenceStart) -> None:
        """Asks whether a sequence can begin."""
        await self._models.ask(StartRequest(self._asked.number, start))

    def give_up(self, step: SequenceStep) -> None:
        """Ends a sequence whose answer cannot be written."""
        self._models.give_up(GiveUp(self._asked.model, self._asked.version, step))

    async def infer(self, request: InferRequest) -> InferAnswer:
        """Answers the request."""
        submission, inputs = self._models.place(self._asked.number, request)
        self._has_room = False
        return await self._models.submit(submission, inputs)


def sendable(text: str) -> str:
    """Returns what a client wrote, without what UTF-8 has no bytes for."""
    return text.encode(errors="replace").decode()
