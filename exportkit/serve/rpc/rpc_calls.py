"""One call: what came beside its messages, who may make it, how it ends, and how it is accounted for."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn
from urllib.parse import unquote

import grpc

from exportkit.serve.request_record import RequestRecord, identity_of, request_id
from exportkit.serve.statuses import BadRequestError, CancelledError, DeadlineError, ServeError, UnauthorizedError

_log = logging.getLogger(__name__)

# A status travels in trailing headers, for which clients reserve 8 KiB: a longer one arrives as another error. There, a
# byte that is not printable ASCII takes three.
_MAX_DETAILS = 2000

# A client that cancels so shortly before its deadline has met it: its clock began when it sent, ours when that arrived.
_TRANSIT_SECONDS = 0.1

_PEER = re.compile(r"ipv[46]:\[?([^\]%]+).*:\d+")

Allow = Callable[[bytes | None], bool]
"""Says whether the value of a client's `authorization` is allowed."""


class RpcCall:
    """A call of a client.

    Attributes:
        method: The full name, such as `/inference.GRPCInferenceService/ModelInfer`.
        metadata: What the client sent beside its messages. Of a key that is there twice, the last value.
        remote: The client's address, without its port. Empty: not known.
        record: What is known about the request.
    """

    def __init__(self, method: str, context: Any, rules: CallRules) -> None:
        """Reads the metadata."""
        self.method = method
        self.metadata: Mapping[str, str | bytes] = dict(context.invocation_metadata() or ())
        self.remote = _address(context.peer())
        self._context = context
        self._rules = rules
        self._client = ""
        self.record = self.new_record()
        self._trailers = (("x-request-id", self.record.id),)
        context.set_trailing_metadata(self._trailers)

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the client's deadline. None: it has none."""
        left: float | None = self._context.time_remaining()
        return left

    async def message(self) -> bytes:
        """Returns the client's message, and does not keep it.

        Raises:
            BadRequestError: There is none.
        """
        message = await self.next_message()
        if message is None:
            raise BadRequestError(f"{self.method} was called without a message")
        return message

    async def next_message(self) -> bytes | None:
        """Returns the client's next message, and does not keep it. None: there was the last one before."""
        # Not by gRPC's iterator over the messages, which keeps the last one.
        message: bytes = await self._context.read()
        if message is grpc.aio.EOF:
            return None
        self.record.received_bytes += len(message)
        if self not in (accepted := self._rules.accepted):
            accepted.add(self)
            self._context.add_done_callback(lambda _: accepted.discard(self))
        return message

    def check_key(self, allow: Allow | None) -> None:
        """Refuses a client that is not allowed.

        Raises:
            BadRequestError: It sent two keys, of which a proxy could have checked the other one.
            UnauthorizedError: It sent none, or a wrong one.
        """
        if allow is None:
            return
        keys = [value for name, value in self._context.invocation_metadata() or () if name == "authorization"]
        if len(keys) > 1:
            raise BadRequestError(f"the call has the metadata authorization {len(keys)} times", hint="Send one.")
        given = keys[0].encode() if keys else None
        if not allow(given):
            raise UnauthorizedError(
                "the call has no valid API key", hint="Send the metadata `authorization: Bearer KEY`"
            )
        if given is not None:
            self.record.client = self._client = identity_of(given)

    def new_record(self) -> RequestRecord:
        """Returns a record of a request of this call, which is the only one unless it is a stream."""
        given = self.metadata.get("x-request-id")
        record = RequestRecord("grpc", request_id(given if isinstance(given, str) else None))
        record.client = self._client
        return record

    @contextmanager
    def answering(self, record: RequestRecord) -> Iterator[None]:
        """Checks the client's key, which it may lose while a stream runs, and accounts for a request.

        Raises:
            ServeError: What the client is told of whatever the work inside raises.
        """
        try:
            self.check_key(self._rules.allow)
            yield
            record.status = 200
        except (asyncio.CancelledError, GeneratorExit):
            late = self.seconds_left is not None and self.seconds_left <= _TRANSIT_SECONDS
            record.failed(
                DeadlineError("the call's deadline passed") if late else CancelledError("the call was cancelled")
            )
            raise
        except Exception as error:
            raise self._refusal(error, record) from None
        finally:
            if self._rules.observe is not None:
                self._rules.observe(self, record)

    def _refusal(self, error: Exception, record: RequestRecord) -> ServeError:
        """Returns what the client is told of an error. What is not for strangers is logged."""
        if not isinstance(error, ServeError):
            _log.error("%s failed", self.method, exc_info=error)
            error = ServeError(f"the server failed ({type(error).__name__})", hint="Its log says more")
        record.failed(error)
        return error

    async def abort(self, error: ServeError) -> NoReturn:
        """Ends the call with the error's status."""
        # gRPC keeps what this raises with the frames that it comes through, and theirs would keep the message.
        error.__traceback__ = error.__context__ = None
        details = error.text.encode()
        if len(details) > _MAX_DETAILS:
            details = details[:_MAX_DETAILS] + b"..."
        trailers: tuple[tuple[str, str], ...] = self._trailers
        if error.retry_after is not None:
            seconds = error.retry_after
            # The first is for clients that know HTTP's header, the second for the retry policy of gRPC's own clients.
            trailers += (("retry-after", f"{seconds}"), ("grpc-retry-pushback-ms", f"{1000 * seconds}"))
        await self._context.abort(grpc.StatusCode[error.code], details.decode(errors="ignore"), trailers)
        raise AssertionError("abort raises")


Observe = Callable[[RpcCall, RequestRecord], None]
"""Gets each request when it is over. A stream is one, and so is each request in it."""


@dataclass(frozen=True)
class CallRules:
    """What all calls of a server share.

    Attributes:
        allow: Who may call. None: everybody.
        observe: Gets each request when it is over.
        accepted: The calls of which a message came, and whose answer is not sent yet.
    """

    allow: Allow | None
    observe: Observe | None
    accepted: set[RpcCall] = field(default_factory=set)


def unary(method: str, answer: Callable[[RpcCall], Awaitable[bytes]], rules: CallRules) -> Any:
    """Returns a handler that answers one message with one message.

    It is a handler of streams of requests, which looks the same to a client. Such a handler starts before the message
    is read, so that a client without a key need not send it. And nothing but `answer` holds the message, so that its
    memory is free as soon as `answer` lets go of it.

    Args:
        method: The full name of the method.
        answer: Returns the answer's bytes. What it raises becomes the status.
        rules: What all calls share.
    """

    async def handle(_: Any, context: Any) -> bytes:
        call = RpcCall(method, context, rules)
        try:
            with call.answering(record := call.record):
                data = await answer(call)
                record.sent_bytes = len(data)
                return data
        except ServeError as error:
            refused = error
        await call.abort(refused)

    return grpc.stream_unary_rpc_method_handler(handle)


def streaming(method: str, answer: Callable[[RpcCall], AsyncGenerator[bytes, None]], rules: CallRules) -> Any:
    """Returns a handler that answers messages with messages. The arguments are those of `unary`."""

    async def handle(_: Any, context: Any) -> AsyncGenerator[bytes, None]:
        call = RpcCall(method, context, rules)
        try:
            with call.answering(record := call.record):
                async with aclosing(answer(call)) as answers:
                    async for data in answers:
                        record.sent_bytes += len(data)
                        yield data
            return
        except ServeError as error:
            refused = error
        await call.abort(refused)

    return grpc.stream_stream_rpc_method_handler(handle)


def _address(peer: str) -> str:
    """Returns the address of such as `ipv4:127.0.0.1:4711` or `ipv6:%5B::1%5D:4711`."""
    found = _PEER.fullmatch(unquote(peer))
    return found[1] if found else ""
