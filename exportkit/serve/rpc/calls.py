"""One call: what came beside its message, and how it ends."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc

from exportkit.serve.statuses import BadRequestError, ServeError, UnauthorizedError

_LOG = logging.getLogger(__name__)

# A status travels in trailing headers, for which clients reserve 8 KiB: a longer one arrives as another error. There, a
# byte that is not printable ASCII takes three.
_MAX_DETAILS = 2000

Allow = Callable[[bytes | None], bool]
"""Says whether the value of a client's `authorization` is allowed."""


@dataclass(frozen=True)
class Call:
    """A call of a client.

    Attributes:
        method: The full name, such as `/inference.GRPCInferenceService/ModelInfer`.
        metadata: What the client sent beside the message. Of a key that is there twice, the last value.
        seconds_left: Seconds until the client's deadline. None: it has none.
    """

    method: str
    metadata: Mapping[str, str | bytes]
    seconds_left: float | None


def answering(method: str, answer: Callable[[bytes, Call], Awaitable[bytes]], allow: Allow | None) -> Any:
    """Returns a handler that answers one message with one message.

    It is a handler of streams of requests, which looks the same to a client. Such a handler starts before the message
    is read, so that a client without a key need not send it. And nothing but `answer` holds the message, so that its
    memory is free as soon as `answer` lets go of it.

    Args:
        method: The full name of the method.
        answer: Gets the message's bytes and returns the answer's. A ServeError becomes the status.
        allow: Who may call. None: everybody.
    """

    async def handle(_: Any, context: Any) -> bytes:
        call = _call(method, context)
        try:
            _check_key(call, allow)
            return await answer(await _message(context), call)
        except Exception as error:
            raise await _abort(context, error) from None

    return grpc.stream_unary_rpc_method_handler(handle)


def streaming(method: str, answer: Callable[[bytes, Call], AsyncIterator[bytes]], allow: Allow | None) -> Any:
    """Returns a handler that answers one message with a stream of messages. The arguments are those of `answering`."""

    async def handle(_: Any, context: Any) -> AsyncIterator[bytes]:
        call = _call(method, context)
        try:
            _check_key(call, allow)
            async for message in answer(await _message(context), call):
                yield message
        except Exception as error:
            raise await _abort(context, error) from None

    return grpc.stream_stream_rpc_method_handler(handle)


def refusing(error: ServeError) -> Any:
    """Returns a handler that refuses whatever comes."""

    async def handle(_: Any, context: Any) -> bytes:
        raise await _abort(context, error)

    return grpc.stream_unary_rpc_method_handler(handle)


def _call(method: str, context: Any) -> Call:
    return Call(method, dict(context.invocation_metadata() or ()), context.time_remaining())


async def _message(context: Any) -> bytes:
    message = await context.read()
    if message is grpc.aio.EOF:
        raise BadRequestError("the call has no message")
    return message


def _check_key(call: Call, allow: Allow | None) -> None:
    if allow is None:
        return
    given = call.metadata.get("authorization")
    if not allow(given.encode() if isinstance(given, str) else given):
        raise UnauthorizedError(
            "the call has no valid API key",
            hint="Send the metadata `authorization: Bearer KEY` with one of the keys.",
        )


async def _abort(context: Any, error: Exception) -> Exception:
    """Ends the call with the error's status. Returns what is to be raised."""
    if not isinstance(error, ServeError):
        _LOG.error("a call failed", exc_info=error)
        error = ServeError(f"the server failed ({type(error).__name__}); its log says more")
    details = str(error)
    if len(details) > _MAX_DETAILS:
        details = details[: _MAX_DETAILS - 3] + "..."
    trailers: tuple[tuple[str, str], ...] = ()
    if error.retry_after is not None:
        # The first is for clients that know HTTP's header, the second for the retry policy of gRPC's own clients.
        trailers = (("retry-after", f"{error.retry_after}"), ("grpc-retry-pushback-ms", f"{1000 * error.retry_after}"))
    try:
        await context.abort(grpc.StatusCode[error.code], details, trailers)
    except Exception as ends:  # grpc.aio's own, by which it knows that the call has ended
        return ends
    return error
