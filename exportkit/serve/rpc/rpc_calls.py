"""One call: what came beside its messages, and how it ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager

from exportkit.serve.request_record import RequestRecord, identity_of, request_id
from exportkit.serve.rpc.rpc_stream import Message, RpcStream
from exportkit.serve.statuses import BadRequestError, CancelledError, DeadlineError, ServeError, UnauthorizedError

_log = logging.getLogger(__name__)

# A client that cancels so shortly before its deadline has met it: its clock began when it sent, ours when that arrived.
_TRANSIT_SECONDS = 0.1

Allow = Callable[[bytes | None], bool]
"""Says whether the value of a client's `authorization` is allowed."""


class RpcCall:
    """A call of a client.

    Attributes:
        method: The full name, such as `/inference.GRPCInferenceService/ModelInfer`.
        metadata: What the client sent beside its messages. Of a key that is there twice, the last value.
        remote: The client's address, without its port. Empty: not known.
        record: What is known about the request.
        stream: Its messages.
    """

    def __init__(self, stream: RpcStream) -> None:
        """Reads the metadata."""
        self.method = stream.method
        self.metadata: Mapping[str, str | bytes] = dict(stream.metadata)
        self.remote = stream.peer
        self.stream = stream
        self._client = ""
        self.record = self.new_record()

    def new_record(self) -> RequestRecord:
        """Returns a record of a request of this call, which is the only one unless it is a stream."""
        given = self.metadata.get("x-request-id")
        record = RequestRecord("grpc", request_id(given if isinstance(given, str) else None))
        record.client = self._client
        return record

    @contextmanager
    def recorded(self, record: RequestRecord, observe: Observe | None) -> Iterator[None]:
        """Completes a record by how the work inside ends, and shows it to `observe`."""
        try:
            yield
            record.status = 200
        except (asyncio.CancelledError, GeneratorExit):
            record.failed(self.why_cancelled())
            raise
        except Exception as error:
            if record.error is None:
                record.failed(_as_serve_error(error))
            raise
        finally:
            if observe is not None:
                observe(self, record)

    def why_cancelled(self) -> ServeError:
        """Returns why the call was cut off."""
        late = self.seconds_left is not None and self.seconds_left <= _TRANSIT_SECONDS
        return DeadlineError("the call's deadline passed") if late else CancelledError("the call was cancelled")

    @property
    def client(self) -> str:
        """Who asks: `identity_of` the API key. Empty: no key is asked for."""
        return self._client

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the client's deadline. None: it has none."""
        return self.stream.seconds_left

    async def message(self) -> Message:
        """Returns the client's message, and does not keep it.

        Raises:
            BadRequestError: There is none.
        """
        message = await self.next_message()
        if message is None:
            raise BadRequestError(f"{self.method} was called without a message")
        return message

    async def next_message(self) -> Message | None:
        """Returns the client's next message, and does not keep it. None: there was the last one before."""
        message = await self.stream.message()
        if message is not None:
            self.record.received_bytes += len(message)
        return message

    def check_key(self, allow: Allow) -> None:
        """Refuses a client that is not allowed.

        Raises:
            BadRequestError: It sent two keys, of which a proxy could have checked the other one.
            UnauthorizedError: It sent none, or a wrong one.
        """
        keys = [value for name, value in self.stream.metadata if name == "authorization"]
        if len(keys) > 1:
            raise BadRequestError(f"the call has the metadata authorization {len(keys)} times", hint="Send one.")
        given = keys[0] if keys else None
        if not allow(given.encode() if isinstance(given, str) else given):
            raise UnauthorizedError(
                "the call has no valid API key",
                hint="Send the metadata `authorization: Bearer KEY`",
            )
        if given is not None:
            self.record.client = self._client = identity_of(given.encode() if isinstance(given, str) else given)

    def end(self) -> None:
        """Ends the call, which was answered."""
        self.stream.finish("OK", trailers=(("x-request-id", self.record.id),))

    def fail(self, error: Exception) -> None:
        """Ends the call with the error's status."""
        if not isinstance(error, ServeError):
            _log.error("%s failed", self.method, exc_info=error)
            error = _as_serve_error(error)
        self.record.failed(error)
        trailers: tuple[tuple[str, str], ...] = (("x-request-id", self.record.id),)
        if error.retry_after is not None:
            seconds = error.retry_after
            # The first is for clients that know HTTP's header, the second for the retry policy of gRPC's own clients.
            trailers += (("retry-after", f"{seconds}"), ("grpc-retry-pushback-ms", f"{1000 * seconds}"))
        self.stream.finish(error.code, error.text, trailers)


Observe = Callable[[RpcCall, RequestRecord], None]
"""Gets each request when it is over. A stream is one, and so is each request in it."""


Answer = Callable[[RpcCall], Awaitable[bytes | None]] | Callable[[RpcCall], AsyncGenerator[bytes, None]]
"""Returns the answer to a call's message, None if it sent its answers itself; or yields them."""


async def answer_call(
    stream: RpcStream,
    answer: Answer,
    allow: Allow | None,
    observe: Observe | None,
) -> None:
    """Answers a call. It begins before a message has come, so that a client without a key need not send it.

    Args:
        stream: The call.
        answer: Answers. What it raises becomes the status.
        allow: Who may call. None: everybody.
        observe: Gets the call when it is over.
    """
    call = RpcCall(stream)
    with call.recorded(call.record, observe):
        try:
            if allow is not None:
                call.check_key(allow)
            answers = answer(call)
            if isinstance(answers, AsyncGenerator):
                async with aclosing(answers) as opened:
                    async for data in opened:
                        call.record.sent_bytes += len(data)
                        stream.send(data)
                        await stream.sent()
            else:
                only = await answers
                if only is not None:
                    call.record.sent_bytes = len(only)
                    stream.send(only)
            call.end()
        except Exception as error:
            call.fail(error)
            raise


def _as_serve_error(error: Exception) -> ServeError:
    """Returns an error that says nothing of the server's inside to strangers."""
    if isinstance(error, ServeError):
        return error
    return ServeError(f"the server failed ({type(error).__name__})", hint="Its log says more")
