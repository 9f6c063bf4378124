"""The methods of inference.GRPCInferenceService."""

from __future__ import annotations

import asyncio
import functools
import inspect
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

from google.protobuf import json_format
from msgspec.structs import replace

from exportkit.serve.engine.execution import BatchResult
from exportkit.serve.engine.repository import Repository
from exportkit.serve.protocol.inference import InferRequest
from exportkit.serve.protocol.parameters import start_in_headers
from exportkit.serve.queries import Queries
from exportkit.serve.request_record import RequestRecord
from exportkit.serve.rpc.infer_messages import (
    ReceivedRequest,
    encode_outputs,
    plain_parameters,
)
from exportkit.serve.rpc.infer_stream import Count, InferStream
from exportkit.serve.rpc.known_heads import Found, KnownForm, KnownHeads
from exportkit.serve.rpc.message_classes import INFERENCE, message_class, methods, read_message
from exportkit.serve.rpc.rpc_calls import Observe, RpcCall
from exportkit.serve.rpc.rpc_stream import Message
from exportkit.serve.rpc.wire import field_head
from exportkit.serve.statuses import NotOfferedError, NotReadyError, NotServedError, ServeError

_STREAMED = message_class("inference.ModelStreamInferResponse")


class InferenceService:
    """Answers from a repository."""

    def __init__(
        self,
        repository: Repository,
        observe: Observe | None = None,
        count: Count | None = None,
    ) -> None:
        """`observe` gets each request of a stream. Those of other calls are seen by their handler.

        `count` counts answered steps, if nobody wants their records.
        """
        self._repository = repository
        self._queries = Queries(repository)
        self.observe, self.count = observe, count
        self._heads = KnownHeads()
        self._streams: set[InferStream] = set()

    async def infer_once(self, call: RpcCall) -> bytes:
        """Answers ModelInfer."""
        start = start_in_headers(call.metadata)
        if start is not None:
            self._repository.check_start(replace(start, owner=call.record.client))
        return await self._infer(await call.message(), call.seconds_left, call.record)

    async def infer_stream(self, call: RpcCall) -> None:
        """Answers ModelStreamInfer, whose requests run together. The answers have the order of the requests."""
        stream = InferStream(self, call)
        self._streams.add(stream)
        try:
            await stream.run()
        finally:
            self._streams.discard(stream)

    def leave(self) -> None:
        """Ends streams whose requests are answered, and the others when theirs are."""
        for stream in list(self._streams):
            stream.leave()

    def in_stream(self, answer: bytes | ServeError) -> bytes:
        """Returns the message of an answer or an error in a stream."""
        if isinstance(answer, ServeError):
            return bytes(_STREAMED(error_message=answer.text).SerializeToString())
        return field_head(_STREAMED.INFER_RESPONSE_FIELD_NUMBER, len(answer)) + answer

    def known(self, message: Message) -> Found | None:
        """Returns what is known of a request that is like one before."""
        return self._heads.find(message)

    def encoded(self, found: Found, result: BatchResult) -> bytes:
        """Returns the answer to such a request."""
        model = found.model
        return encode_outputs(model.name, model.version, found.id, result.outputs)

    def begins(self, found: Found) -> bool:
        """Whether who answered requests like this one would begin its sequence, too: not if there is a newer one."""
        try:
            return self._repository.model(*found.known.asked) is found.model
        except ServeError:  # `infer` says what it is
            return False

    async def infer(self, data: Message, seconds_left: float | None, record: RequestRecord) -> bytes:
        """Answers a request of a stream."""
        return await self._infer(data, seconds_left, record, learn=True)

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
        self, data: Message, seconds_left: float | None, record: RequestRecord, *, learn: bool = False
    ) -> bytes:
        received = ReceivedRequest(data)
        model = self._repository.model(received.model, received.version, received.method)
        record.model, record.version = model.name, model.version
        with model.admit(received.size, waits=learn and received.is_step):
            read = functools.partial(received.request, seconds_left)
            request = await asyncio.to_thread(read) if received.long else read()
            head = self._learn(data, received, request, model) if learn else None
            del data, received, read  # While the request waits, its inputs are in memory once.
            record.sequence = None if request.sequence is None else request.sequence.id
            request = request.owned_by(record.client)
            answer = await model.infer(request)
        record.timing = answer.timing
        if head is not None and request.sequence is not None:
            self._heads.add(*head)
        try:
            return encode_outputs(answer.model, answer.version, answer.id, answer.outputs)
        except BaseException:
            if request.sequence is not None:  # it changed the state, and its client does not have the answer
                model.give_up(request.sequence)
            raise

    def _learn(
        self, data: Message, received: ReceivedRequest, request: InferRequest, model: Any
    ) -> tuple[bytes, KnownForm] | None:
        """Returns what to remember of a step, once it is answered, to answer those like it without reading them."""
        step = request.sequence
        if step is None or any(tensor.datatype == "BOOL" for tensor in request.inputs):
            return None
        sizes = [tensor.data.nbytes for tensor in request.inputs]
        learnt = self._heads.learn(data, sizes, request.id, step)
        served = model.of_method(request.method)
        if learnt is None:
            return None
        if (known := self._heads.of(learnt[0], served)) is not None:
            return learnt[0], known
        form = served.form(request)
        if form is None:
            return None
        asked = (received.model, received.version, received.method)
        return learnt[0], KnownForm(request.priority, learnt[1], weakref.ref(served), form, asked)


def _model_ready(queries: Queries, asked: Any) -> dict[str, bool]:
    """A model that is unknown is not ready."""
    try:
        return {"ready": queries.repository.named(asked.name, asked.version).ready}
    except (NotServedError, NotReadyError):
        return {"ready": False}
