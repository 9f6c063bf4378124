"""The methods of inference.GRPCInferenceService."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from google.protobuf import json_format

from exportkit.serve.engine.repository import Repository
from exportkit.serve.queries import Queries
from exportkit.serve.request_record import RequestRecord
from exportkit.serve.rpc.infer_messages import (
    ReceivedRequest,
    encode_outputs,
    plain_parameters,
)
from exportkit.serve.rpc.infer_stream import InferStream
from exportkit.serve.rpc.message_classes import INFERENCE, methods, read_message
from exportkit.serve.rpc.rpc_calls import Observe, RpcCall
from exportkit.serve.rpc.rpc_stream import Message
from exportkit.serve.statuses import NotOfferedError, NotReadyError, NotServedError


class InferenceService:
    """Answers from a repository."""

    def __init__(self, repository: Repository, observe: Observe | None = None) -> None:
        """`observe` gets each request of a stream. Those of other calls are seen by their handler."""
        self._repository = repository
        self._queries = Queries(repository)
        self._observe = observe
        self._streams: set[InferStream] = set()

    async def infer_once(self, call: RpcCall) -> bytes:
        """Answers ModelInfer."""
        return await self._infer(await call.message(), call.seconds_left, call.record)

    async def infer_stream(self, call: RpcCall) -> None:
        """Answers ModelStreamInfer, whose requests run together. The answers have the order of the requests."""
        stream = InferStream(partial(self._infer, streamed=True), self._observe, call)
        self._streams.add(stream)
        try:
            await stream.run()
        finally:
            self._streams.discard(stream)

    def leave(self) -> None:
        """Ends streams whose requests are answered, and the others when theirs are."""
        for stream in list(self._streams):
            stream.leave()

    def method(self, name: str) -> Callable[[RpcCall], Awaitable[bytes]]:
        """Returns one of the other methods."""
        takes, returns = methods(INFERENCE)[name]
        answer = self._answers()[name]

        async def from_bytes(call: RpcCall) -> bytes:
            request = read_message(takes, await call.message())
            if repository := getattr(request, "repository_name", ""):
                raise NotOfferedError(f"this server has one model repository, without a name; got {repository!r}")
            fields = answer(self._queries, request)
            if inspect.isawaitable(fields):
                fields = await fields
            # The protocol's JSON may say more than its messages have fields for.
            message = json_format.ParseDict(fields or {}, returns(), ignore_unknown_fields=True)
            return bytes(message.SerializeToString())

        return from_bytes

    def _answers(self) -> dict[str, Callable[[Queries, Any], Any]]:
        """Returns what each method answers to its message: the protocol's JSON, or what to await for it."""
        return {
            "ServerLive": lambda *_: {"live": self._repository.lost is None},
            "ServerReady": lambda *_: {"ready": self._repository.ready},
            "ServerMetadata": lambda queries, _: queries.server_metadata(),
            "ModelReady": _model_ready,
            "ModelMetadata": lambda queries, asked: queries.metadata(asked.name, asked.version),
            "ModelConfig": lambda queries, asked: {"config": queries.config(asked.name, asked.version)},
            "ModelStatistics": lambda queries, asked: queries.statistics(asked.name, asked.version),
            "RepositoryIndex": lambda queries, asked: {"models": queries.index(asked.ready)},
            "RepositoryModelLoad": lambda queries, asked: queries.load(
                asked.model_name, plain_parameters(asked.parameters)
            ),
            "RepositoryModelUnload": lambda queries, asked: queries.unload(asked.model_name),
        }

    async def _infer(
        self, data: Message, seconds_left: float | None, record: RequestRecord, *, streamed: bool = False
    ) -> bytes:
        received = ReceivedRequest(data)
        model = self._repository.model(received.model, received.version, received.method)
        record.model, record.version = model.name, model.version
        with model.admit(received.size, waits=streamed and received.is_step):
            read = partial(received.request, seconds_left)
            request = await asyncio.to_thread(read) if received.long else read()
            del data, received, read  # While the request waits, its inputs are in memory once.
            record.sequence = None if request.sequence is None else request.sequence.id
            request = request.owned_by(record.client)
            answer = await model.infer(request)
        record.timing = answer.timing
        try:
            return encode_outputs(answer.model, answer.version, answer.id, answer.outputs)
        except BaseException:
            if request.sequence is not None:  # it changed the state, and its client does not have the answer
                model.give_up(request.sequence)
            raise


def _model_ready(queries: Queries, asked: Any) -> dict[str, bool]:
    """A model that is unknown is not ready."""
    try:
        return {"ready": queries.repository.named(asked.name, asked.version).ready}
    except (NotServedError, NotReadyError):
        return {"ready": False}
