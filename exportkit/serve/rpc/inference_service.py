"""The methods of inference.GRPCInferenceService."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from google.protobuf import json_format

from exportkit.serve.engine.repository import Repository
from exportkit.serve.queries import Queries
from exportkit.serve.request_record import RequestRecord
from exportkit.serve.rpc.infer_messages import (
    ReceivedRequest,
    encode_answer,
    plain_parameters,
    streamed_answer,
    streamed_error,
)
from exportkit.serve.rpc.message_classes import INFERENCE, methods, read_message
from exportkit.serve.rpc.rpc_calls import RpcCall
from exportkit.serve.statuses import NotOfferedError, NotReadyError, NotServedError, ServeError

MOST_REQUESTS = 256  # of a stream that are not answered, as many as a client without streams may well send


class InferenceService:
    """Answers from a repository."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        self._queries = Queries(repository)
        self._reading: set[asyncio.Task[None]] = set()

    async def infer(self, call: RpcCall) -> bytes:
        """Answers ModelInfer."""
        return await self._infer(await call.message(), call.seconds_left, call.record)

    async def infer_stream(self, call: RpcCall) -> AsyncGenerator[bytes, None]:
        """Answers ModelStreamInfer. Its requests run together, and are answered in their order.

        They begin in their order, too, as the steps of a sequence must. While MOST_REQUESTS are not answered, or their
        answers are not taken, no more are read.
        """
        running: asyncio.Queue[asyncio.Task[bytes] | None] = asyncio.Queue()
        room = asyncio.Semaphore(MOST_REQUESTS)
        tasks: set[asyncio.Task[Any]] = set()

        async def read() -> None:
            await room.acquire()
            while (message := await call.next_message()) is not None:
                running.put_nowait(task := asyncio.create_task(self._infer_streamed(message, call)))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
                del message
                await room.acquire()

        reading = asyncio.create_task(read())
        reading.add_done_callback(lambda _: running.put_nowait(None))
        self._reading.add(reading)
        try:
            while (task := await running.get()) is not None:
                yield await task
                del task  # the answer was sent
                room.release()
        finally:
            self._reading.discard(reading)
            for task in (left := [reading, *tasks]):
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    def leave(self) -> None:
        """Ends each stream once the requests that came are answered: the server ends, and the client may never do."""
        for reading in self._reading:
            reading.cancel()

    def answers(self) -> dict[str, Callable[[RpcCall], Awaitable[bytes]]]:
        """Returns what answers each method but ModelStreamInfer."""
        ask = self._queries
        found: dict[str, Callable[[Any], Any]] = {
            "ServerLive": lambda _: {"live": self._repository.lost is None},
            "ServerReady": lambda _: {"ready": self._repository.ready},
            "ServerMetadata": lambda _: ask.server_metadata(),
            "ModelReady": self._model_ready,
            "ModelMetadata": lambda asked: ask.metadata(asked.name, asked.version),
            "ModelConfig": lambda asked: {"config": ask.config(asked.name, asked.version)},
            "ModelStatistics": lambda asked: ask.statistics(asked.name, asked.version),
            "RepositoryIndex": lambda asked: {"models": ask.index(asked.ready)},
            "RepositoryModelLoad": lambda asked: ask.load(asked.model_name, plain_parameters(asked.parameters)),
            "RepositoryModelUnload": lambda asked: ask.unload(asked.model_name),
        }
        return {"ModelInfer": self.infer, **{name: _from_json(name, answer) for name, answer in found.items()}}

    def _model_ready(self, asked: Any) -> dict[str, bool]:
        """A model that is unknown is not ready."""
        try:
            return {"ready": self._repository.named(asked.name, asked.version).ready}
        except (NotServedError, NotReadyError):
            return {"ready": False}

    async def _infer_streamed(self, data: bytes, call: RpcCall) -> bytes:
        """Returns the stream's message with the answer to a request, or with its error."""
        record = call.new_record()
        record.received_bytes = len(data)
        try:
            with call.answering(record):
                inference = self._infer(data, call.seconds_left, record, streamed=True)
                del data  # while the request waits, its inputs are in memory once
                answer = await inference
                record.sent_bytes = len(answer)
            return streamed_answer(answer)
        except ServeError as error:
            return streamed_error(error.text)

    async def _infer(
        self, data: bytes, seconds_left: float | None, record: RequestRecord, *, streamed: bool = False
    ) -> bytes:
        received = ReceivedRequest(data)
        del data
        record.asked = received.model
        model = self._repository.model(received.model, received.version, received.method)
        record.model, record.version = model.name, model.version
        with model.admit(received.size, waits=streamed and received.sequence is not None):
            record.sequence = None if received.sequence is None else received.sequence.id
            request = received.request(seconds_left).owned_by(record.client)
            del received
            answer = await model.infer(request)
        record.timing = answer.timing
        try:
            return encode_answer(answer)
        except BaseException:
            if request.sequence is not None:  # it changed the state, and its client does not have the answer
                model.cancel(request.sequence)
            raise


def _from_json(name: str, answer: Callable[[Any], Any]) -> Callable[[RpcCall], Awaitable[bytes]]:
    """Returns a method whose answer is the protocol's JSON, or what to await for it."""
    takes, returns = methods(INFERENCE)[name]

    async def from_json(call: RpcCall) -> bytes:
        request = read_message(takes, await call.message())
        call.record.asked = getattr(request, "model_name", "") or getattr(request, "name", "")
        if repository := getattr(request, "repository_name", ""):
            raise NotOfferedError(f"this server has one model repository, without a name; got {repository!r}")
        fields = answer(request)
        if inspect.isawaitable(fields):
            fields = await fields
        # The protocol's JSON may say more than its messages have fields for.
        return bytes(json_format.ParseDict(fields, returns(), ignore_unknown_fields=True).SerializeToString())

    return from_json
