"""One call: what came beside its messages, and how it ends."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import grpc

from exportkit.serve.statuses import BadRequestError, ServeError, UnauthorizedError

_LOG = logging.getLogger(__name__)

# A status travels in trailing headers, for which clients reserve 8 KiB: a longer one arrives as another error. There, a
# byte that is not printable ASCII takes three.
_MAX_DETAILS = 2000

Allow = Callable[[bytes | None], bool]
"""Says whether the value of a client's `authorization` is allowed."""


class Call:
    """A call of a client.

    Attributes:
        method: The full name, such as `/inference.GRPCInferenceService/ModelInfer`.
        metadata: What the client sent beside its messages. Of a key that is there twice, the last value.
    """

    def __init__(self, method: str, context: Any) -> None:
        """Reads the metadata."""
        self.method = method
        self.metadata: Mapping[str, str | bytes] = dict(context.invocation_metadata() or ())
        self._context = context

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
        message = await self._context.read()
        return None if message is grpc.aio.EOF else message

    def check_key(self, allow: Allow) -> None:
        """Raises UnauthorizedError unless the client is allowed."""
        given = self.metadata.get("authorization")
        if not allow(given.encode() if isinstance(given, str) else given):
            raise UnauthorizedError(
                "the call has no valid API key",
                hint="Send the metadata `authorization: Bearer KEY`",
            )

    async def fail(self, error: Exception) -> Exception:
        """Ends the call with the error's status. Returns what is to be raised then."""
        if not isinstance(error, ServeError):
            _LOG.error("%s failed", self.method, exc_info=error)
            error = ServeError(f"the server failed ({type(error).__name__})", hint="Its log says more")
        details = error.text.encode()
        if len(details) > _MAX_DETAILS:
            details = details[:_MAX_DETAILS] + b"..."
        trailers: tuple[tuple[str, str], ...] = ()
        if error.retry_after is not None:
            seconds = error.retry_after
            # The first is for clients that know HTTP's header, the second for the retry policy of gRPC's own clients.
            trailers = (("retry-after", f"{seconds}"), ("grpc-retry-pushback-ms", f"{1000 * seconds}"))
        try:
            await self._context.abort(grpc.StatusCode[error.code], details.decode(errors="ignore"), trailers)
        except Exception as ended:  # by this, grpc.aio knows that the call has ended
            return ended
        return error


def answering(method: str, answer: Callable[[Call], Awaitable[bytes]], allow: Allow | None) -> Any:
    """Returns a handler that answers one message with one message.

    It is a handler of streams of requests, which looks the same to a client. Such a handler starts before the message
    is read, so that a client without a key need not send it. And nothing but `answer` holds the message, so that its
    memory is free as soon as `answer` lets go of it.

    Args:
        method: The full name of the method.
        answer: Returns the answer's bytes. What it raises becomes the status.
        allow: Who may call. None: everybody.
    """

    async def handle(_: Any, context: Any) -> bytes:
        call = Call(method, context)
        try:
            if allow is not None:
                call.check_key(allow)
            return await answer(call)
        except Exception as error:
            raise await call.fail(error) from None

    return grpc.stream_unary_rpc_method_handler(handle)


def streaming(method: str, answer: Callable[[Call], AsyncIterator[bytes]], allow: Allow | None) -> Any:
    """Returns a handler that answers messages with messages. The arguments are those of `answering`."""

    async def handle(_: Any, context: Any) -> AsyncIterator[bytes]:
        call = Call(method, context)
        try:
            if allow is not None:
                call.check_key(allow)
            async for message in answer(call):
                yield message
        except Exception as error:
            raise await call.fail(error) from None

    return grpc.stream_stream_rpc_method_handler(handle)


def refusing(method: str, error: ServeError) -> Any:
    """Returns a handler that refuses whatever comes."""

    async def handle(_: Any, context: Any) -> bytes:
        raise await Call(method, context).fail(error)

    return grpc.stream_unary_rpc_method_handler(handle)
