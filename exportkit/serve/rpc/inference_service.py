"""The methods of inference.GRPCInferenceService. Each is named as in the protocol, and returns the protocol's JSON."""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from google.protobuf import json_format

from exportkit.serve.engine.repository import Repository
from exportkit.serve.protocol.shared_memory import SharedMemory
from exportkit.serve.queries import Queries
from exportkit.serve.request_record import RequestRecord
from exportkit.serve.rpc.infer_messages import ReceivedRequest, encode_infer_answer, plain_parameters
from exportkit.serve.rpc.message_classes import INFERENCE, message_class, methods, read_message
from exportkit.serve.rpc.rpc_calls import Call, Observe
from exportkit.serve.rpc.wire import join
from exportkit.serve.statuses import NotOfferedError, NotReadyError, NotServedError, ServeError

Fields = dict[str, Any]

_STREAMED = message_class("inference.ModelStreamInferResponse")
_MOST_IN_A_STREAM = 64  # requests of a stream that wait or run, as many as a client without streams may well send


class InferenceService:
    """Answers from a repository."""

    def __init__(
        self, repository: Repository, shared_memory: SharedMemory | None, observe: Observe | None = None
    ) -> None:
        """`observe` gets each request of a stream. Those of other calls are seen by their handler."""
        self._repository = repository
        self._queries = Queries(repository, shared_memory)
        self._shared_memory = shared_memory
        self._observe = observe

    async def infer(self, call: Call) -> bytes:
        """Answers ModelInfer."""
        return await self._infer(await call.message(), call.seconds_left, call.record)

    def infer_stream(self, call: Call) -> AsyncIterator[bytes]:
        """Answers ModelStreamInfer, whose requests run together. The answers have the order of the requests."""

        async def answer(message: bytes) -> bytes:
            record = call.new_record()
            record.received_bytes = len(message)
            inference = self._infer(message, call.seconds_left, record)
            del message
            try:
                with call.recorded(record, self._observe):
                    data = await inference
                    record.sent_bytes = len(data)
                return join(b"", _STREAMED.INFER_RESPONSE_FIELD_NUMBER, [memoryview(data)])
            except ServeError as error:
                return bytes(_STREAMED(error_message=error.text).SerializeToString())

        return _answers_in_order(call.next_message, answer, _MOST_IN_A_STREAM)

    def method(self, name: str) -> Callable[[Call], Awaitable[bytes]]:
        """Returns one of the other methods."""
        takes, returns = methods(INFERENCE)[name]
        answer: Callable[[Any], Awaitable[Fields]] = getattr(self, name)

        async def from_bytes(call: Call) -> bytes:
            fields = await answer(read_message(takes, await call.message()))
            # The protocol's JSON may say more than its messages have fields for.
            message = json_format.ParseDict(fields, returns(), ignore_unknown_fields=True)
            return bytes(message.SerializeToString())

        return from_bytes

    async def _infer(self, data: bytes, seconds_left: float | None, record: RequestRecord) -> bytes:
        received = ReceivedRequest(data)
        model = self._repository.model(received.model, received.version)
        record.model, record.version = model.name, model.version
        regions = received.regions
        with model.admit(received.size):
            read = functools.partial(received.request, seconds_left, self._shared_memory)
            request = await asyncio.to_thread(read) if received.long else read()
            del data, received, read  # While the request waits, its inputs are in memory once.
            answer = await model.infer(request)
        record.timing = answer.timing
        return encode_infer_answer(answer, regions, self._shared_memory)

    async def ServerLive(self, _: Any) -> Fields:
        """Whether the process answers."""
        return {"live": True}

    async def ServerReady(self, _: Any) -> Fields:
        """Whether every model answers."""
        return {"ready": self._repository.ready}

    async def ServerMetadata(self, _: Any) -> Fields:
        """The server's name, version and extensions."""
        return self._queries.server_metadata()

    async def ModelReady(self, request: Any) -> Fields:
        """Whether a model answers. A model that is unknown does not."""
        try:
            return {"ready": self._repository.model(request.name, request.version).ready}
        except (NotServedError, NotReadyError):
            return {"ready": False}

    async def ModelMetadata(self, request: Any) -> Fields:
        """A model's inputs and outputs."""
        return self._repository.model(request.name, request.version).metadata()

    async def ModelConfig(self, request: Any) -> Fields:
        """A model's configuration, as Triton has it."""
        return {"config": self._repository.model(request.name, request.version).config()}

    async def ModelStatistics(self, request: Any) -> Fields:
        """What was counted of a version, of all versions of a model, or of all models."""
        return self._queries.statistics(request.name, request.version)

    async def RepositoryIndex(self, request: Any) -> Fields:
        """The models there are."""
        _check_repository(request.repository_name)
        return {"models": self._queries.index(request.ready)}

    async def RepositoryModelLoad(self, request: Any) -> Fields:
        """Loads a model."""
        _check_repository(request.repository_name)
        return await self._queries.load(request.model_name, plain_parameters(request.parameters))

    async def RepositoryModelUnload(self, request: Any) -> Fields:
        """Unloads a model."""
        _check_repository(request.repository_name)
        return await self._queries.unload(request.model_name)

    async def SystemSharedMemoryStatus(self, request: Any) -> Fields:
        """The regions that clients registered."""
        return {"regions": {region["name"]: region for region in self._queries.memory.status(request.name)}}

    async def SystemSharedMemoryRegister(self, request: Any) -> Fields:
        """Registers a region."""
        self._queries.memory.register(request.name, request.key, request.offset, request.byte_size)
        return {}

    async def SystemSharedMemoryUnregister(self, request: Any) -> Fields:
        """Forgets a region, or all."""
        self._queries.memory.unregister(request.name)
        return {}


def _check_repository(name: str) -> None:
    if name:
        raise NotOfferedError(f"this server has one model repository, without a name; got {name!r}")


async def _answers_in_order(
    read: Callable[[], Awaitable[bytes | None]], answer: Callable[[bytes], Awaitable[bytes]], most: int
) -> AsyncIterator[bytes]:
    """Yields the answers to the requests of a stream. If this is closed or cancelled, so is what runs.

    Args:
        read: Returns the next request; None after the last.
        answer: Answers a request. What it raises ends the stream.
        most: The number of requests that run together. The next is read when the first of them is answered.
    """
    running: deque[asyncio.Future[bytes]] = deque()
    reading: asyncio.Future[bytes | None] | None = asyncio.ensure_future(read())
    try:
        while reading is not None or running:
            watched: list[asyncio.Future[Any]] = list(running)[:1]
            if reading is not None and len(running) < most:
                watched.append(reading)
            await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            if reading is not None and reading.done() and len(running) < most:
                request = reading.result()
                if request is None:
                    reading = None
                else:
                    running.append(asyncio.ensure_future(answer(request)))
                    reading = asyncio.ensure_future(read())
                del request
            while running and running[0].done():
                yield running.popleft().result()
    finally:
        left: list[asyncio.Future[Any]] = [*running, *([] if reading is None else [reading])]
        for future in left:
            future.cancel()
        await asyncio.gather(*left, return_exceptions=True)
