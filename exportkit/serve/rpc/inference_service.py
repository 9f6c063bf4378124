"""The methods of inference.GRPCInferenceService."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from google.protobuf import json_format
from msgspec.structs import replace

from exportkit.serve.engine.repository import Repository
from exportkit.serve.protocol.parameters import start_in_headers
from exportkit.serve.protocol.shared_memory import SharedMemory
from exportkit.serve.queries import Queries
from exportkit.serve.request_record import RequestRecord
from exportkit.serve.rpc.infer_messages import ReceivedRequest, encode_infer_answer, plain_parameters
from exportkit.serve.rpc.message_classes import INFERENCE, message_class, methods, read_message
from exportkit.serve.rpc.rpc_calls import Observe, RpcCall
from exportkit.serve.rpc.rpc_stream import Message
from exportkit.serve.rpc.wire import join
from exportkit.serve.statuses import NotOfferedError, NotReadyError, NotServedError, ServeError

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

    async def infer(self, call: RpcCall) -> bytes:
        """Answers ModelInfer."""
        start = start_in_headers(call.metadata)
        if start is not None:
            self._repository.check_start(replace(start, owner=call.record.client))
        return await self._infer(await call.message(), call.seconds_left, call.record)

    def infer_stream(self, call: RpcCall) -> AsyncGenerator[bytes, None]:
        """Answers ModelStreamInfer, whose requests run together. The answers have the order of the requests."""

        async def answer(message: Message) -> bytes:
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

    def method(self, name: str) -> Callable[[RpcCall], Awaitable[bytes]]:
        """Returns one of the other methods."""
        takes, returns = methods(INFERENCE)[name]
        answer = self._answers()[name]

        async def from_bytes(call: RpcCall) -> bytes:
            request = read_message(takes, await call.message())
            if repository := getattr(request, "repository_name", ""):
                raise NotOfferedError(f"this server has one model repository, without a name; got {repository!r}")
            fields = answer(request)
            if inspect.isawaitable(fields):
                fields = await fields
            # The protocol's JSON may say more than its messages have fields for.
            message = json_format.ParseDict(fields or {}, returns(), ignore_unknown_fields=True)
            return bytes(message.SerializeToString())

        return from_bytes

    def _answers(self) -> dict[str, Callable[[Any], Any]]:
        """Returns what each method answers to its message: the protocol's JSON, or what to await for it."""
        queries, model = self._queries, self._repository.named
        return {
            "ServerLive": lambda _: {"live": True},
            "ServerReady": lambda _: {"ready": self._repository.ready},
            "ServerMetadata": lambda _: queries.server_metadata(),
            "ModelReady": self._model_ready,
            "ModelMetadata": lambda asked: model(asked.name, asked.version).metadata(),
            "ModelConfig": lambda asked: {"config": model(asked.name, asked.version).config()},
            "ModelStatistics": lambda asked: queries.statistics(asked.name, asked.version),
            "RepositoryIndex": lambda asked: {"models": queries.index(asked.ready)},
            "RepositoryModelLoad": lambda asked: queries.load(asked.model_name, plain_parameters(asked.parameters)),
            "RepositoryModelUnload": lambda asked: queries.unload(asked.model_name),
            "SystemSharedMemoryStatus": lambda asked: {
                "regions": {region["name"]: region for region in queries.memory.status(asked.name)}
            },
            "SystemSharedMemoryRegister": lambda asked: queries.memory.register(
                asked.name, asked.key, asked.offset, asked.byte_size
            ),
            "SystemSharedMemoryUnregister": lambda asked: queries.memory.unregister(asked.name),
        }

    def _model_ready(self, asked: Any) -> dict[str, bool]:
        """A model that is unknown is not ready."""
        try:
            return {"ready": self._repository.named(asked.name, asked.version).ready}
        except (NotServedError, NotReadyError):
            return {"ready": False}

    async def _infer(self, data: Message, seconds_left: float | None, record: RequestRecord) -> bytes:
        received = ReceivedRequest(data)
        model = self._repository.model(received.model, received.version, received.method)
        record.model, record.version = model.name, model.version
        regions = received.regions
        with model.admit(received.size):
            read = functools.partial(received.request, seconds_left, self._shared_memory)
            request = await asyncio.to_thread(read) if received.long else read()
            del data, received, read  # While the request waits, its inputs are in memory once.
            record.sequence = None if request.sequence is None else request.sequence.id
            request = request.owned_by(record.client)
            answer = await model.infer(request)
        record.timing = answer.timing
        try:
            return encode_infer_answer(answer, regions, self._shared_memory)
        except BaseException:
            if request.sequence is not None:  # it changed the state, and its client does not have the answer
                model.give_up(request.sequence)
            raise


async def _answers_in_order(
    read: Callable[[], Awaitable[Message | None]], answer: Callable[[Message], Awaitable[bytes]], most: int
) -> AsyncGenerator[bytes, None]:
    """Yields the answers to the requests of a stream. If this is closed or cancelled, so is what runs.

    Args:
        read: Returns the next request; None after the last.
        answer: Answers a request. What it raises ends the stream.
        most: The number of requests that run together. The next is read when the first of them is answered.
    """
    running: deque[asyncio.Future[bytes]] = deque()
    reading: asyncio.Future[Message | None] | None = asyncio.ensure_future(read())
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
