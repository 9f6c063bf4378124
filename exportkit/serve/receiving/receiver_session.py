"""Answers one receiver, in the process that has the models."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from msgspec.structs import replace
from starlette.types import ASGIApp

from exportkit.serve.engine.repository import Repository
from exportkit.serve.protocol.admission import LocalAdmission, admission_to
from exportkit.serve.protocol.http_request import BodyRules
from exportkit.serve.receiving.body_memory import MappedMemory
from exportkit.serve.receiving.forwarding import SCOPE
from exportkit.serve.receiving.receiver_messages import (
    AdmissionAnswer,
    AdmissionRequest,
    Answered,
    Cancel,
    Counted,
    Forward,
    Forwarded,
    FromReceiver,
    GiveUp,
    Grown,
    GrowRequest,
    InputsReleased,
    Refused,
    StartRequest,
    Submission,
)
from exportkit.serve.request_record import RequestRecord
from exportkit.serve.statuses import CancelledError, ServeError
from exportkit.serve.tenants.tenants import Tenants

_NOTHING = memoryview(b"")


@dataclass
class _Request:
    """A request that has room."""

    admission: LocalAdmission
    inputs: list[np.ndarray] = field(default_factory=list)
    task: asyncio.Task[None] | None = None


class ReceiverSession:
    """Answers the messages of one receiver. All methods are for the event loop's thread."""

    def __init__(
        self,
        repository: Repository,
        application: ASGIApp,
        memory: MappedMemory,
        send: Callable[..., None],
        counted: Callable[[Counted], None],
        tenants: Tenants | None = None,
    ) -> None:
        """Nothing was asked.

        Args:
            repository: The models.
            application: Answers every URL but inferences.
            memory: Has the bodies.
            send: Sends a message and the bytes behind it.
            counted: Gets what the receiver counts.
            tenants: The clients that may ask. None: no key is asked for.
        """
        self._repository = repository
        self._application = application
        self._memory = memory
        self._send = send
        self._counted = counted
        self._tenants = tenants
        self._loop = asyncio.get_running_loop()
        self._requests: dict[int, _Request] = {}
        self._forwarding: set[asyncio.Task[None]] = set()
        self._told: set[int] = set()  # the loads whose rules the receiver knows

    def received(self, message: FromReceiver, behind: memoryview) -> None:
        """Takes a message. Raises KeyError or ValueError if no receiver of ours would send it."""
        if isinstance(message, AdmissionRequest):
            self._admit(message)
        elif isinstance(message, GrowRequest):
            self._ask(message.number, lambda admission: admission.reserve(message.size))
        elif isinstance(message, StartRequest):
            self._ask(message.number, lambda admission: admission.check_start_now(message.start))
        elif isinstance(message, GiveUp):
            with suppress(ServeError):  # the model is gone, and its sequences with it
                self._repository.named(message.model, message.version).give_up(message.step)
        elif isinstance(message, Submission):
            self._submit(message)
        elif isinstance(message, Cancel):
            self._cancel(message.number)
        elif isinstance(message, Counted):
            self._counted(message)
        elif isinstance(message, Forward):
            task = self._loop.create_task(self._forward(message, behind))
            self._forwarding.add(task)
            task.add_done_callback(self._forwarding.discard)

    def ended(self) -> None:
        """The receiver is gone, and with it the clients of its requests."""
        for number in list(self._requests):
            self._cancel(number)
        for task in self._forwarding:
            task.cancel()

    def _admit(self, asked: AdmissionRequest) -> None:
        if asked.number in self._requests:
            raise ValueError(f"the request {asked.number} is there already")
        try:
            tenant = None if self._tenants is None else self._tenants.get(asked.client)
            admitted = admission_to(self._repository, asked.model, asked.version, asked.size, tenant).enter()
        except Exception as error:
            self._send(Refused.of(asked.number, error))
            return
        model = admitted.model
        refused = None
        if admitted.refused is None:
            self._requests[asked.number] = _Request(admitted)
        else:
            admitted.leave()
            refused = Refused.of(asked.number, admitted.refused)
        rules = self._new_rules(model.serial, model.body_rules)
        self._send(AdmissionAnswer(asked.number, model.name, model.version, model.serial, rules, refused))

    def _new_rules(self, serial: int, rules: BodyRules) -> BodyRules | None:
        """Returns the rules of a load that the receiver has not heard of."""
        if serial in self._told:
            return None
        self._told.add(serial)
        return rules

    def _ask(self, number: int, allow: Callable[[LocalAdmission], None]) -> None:
        request = self._requests[number]
        try:
            allow(request.admission)
        except Exception as error:
            self._send(Refused.of(number, error))
            return
        self._send(Grown(number))

    def _cancel(self, number: int) -> None:
        request = self._requests.get(number)
        if request is None:  # it was answered meanwhile
            return
        if request.task is not None:
            request.task.cancel()
            return
        del self._requests[number]
        request.admission.leave()

    def _submit(self, message: Submission) -> None:
        request = self._requests[message.number]
        if request.task is not None or len(message.places) != len(message.request.inputs):
            raise ValueError(f"the request {message.number} was sent twice, or not as a whole")
        request.inputs = [self._memory.view(place.offset, place.size) for place in message.places]
        request.task = self._loop.create_task(self._answer(request, message))
        request.task.add_done_callback(partial(self._finished, message.number))

    async def _answer(self, request: _Request, message: Submission) -> None:
        placed = zip(message.request.inputs, request.inputs)
        inputs = tuple(replace(tensor, data=part.data) for tensor, part in placed)
        answer = await request.admission.infer(replace(message.request, inputs=inputs))
        data = [output.data for output in answer.outputs]
        outputs = tuple(replace(output, data=_NOTHING) for output in answer.outputs)
        sizes = tuple(part.nbytes for part in data)
        self._send(Answered(message.number, replace(answer, outputs=outputs), sizes), data)

    def _finished(self, number: int, task: asyncio.Task[None]) -> None:
        """A request was answered, or is refused now. A task that is cancelled before it begins ends here, too."""
        request = self._requests.pop(number)
        request.task = None  # whose error has the frame that has the request: a cycle, which would keep the inputs
        request.admission.leave()
        error = CancelledError("the client went away") if task.cancelled() else task.exception()
        if error is not None:  # the receiver knows which request it was, and logs what nobody expected
            self._refuse(number, error, request.inputs)

    def _refuse(self, number: int, error: BaseException, inputs: list[np.ndarray]) -> None:
        """Refuses a request. A batch that it is in may still run, and read its inputs."""
        self._send(Refused.of(number, error, reads=bool(inputs)))
        left = len(inputs)

        def released() -> None:
            nonlocal left
            left -= 1
            if not left:
                self._send(InputsReleased(number))

        for part in inputs:
            weakref.finalize(part, self._call_in_loop, released)

    def _call_in_loop(self, function: Callable[[], None]) -> None:
        """Calls a function in the event loop. Any thread may call this: the last reference may be a runner's."""
        with suppress(RuntimeError):  # the loop was closed, so nobody waits
            self._loop.call_soon_threadsafe(function)

    async def _forward(self, message: Forward, body: memoryview) -> None:
        record = RequestRecord(id=message.request_id, client=message.client)
        given = {name: message.scope[name] for name in SCOPE}  # nothing else of it is the receiver's to say
        scope = {**given, "type": "http", "headers": message.headers, "exportkit": record}
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
