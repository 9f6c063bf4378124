"""Receives the body of a request into one buffer, within limits of size and time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from starlette.types import Message, Receive, Scope

from exportkit.serve.http.content_coding import Coding, Inflater, coding_of_body
from exportkit.serve.http.exchange import FILL, HttpOptions, headers_of
from exportkit.serve.protocol.http_request import header_length_of, number_of_bytes
from exportkit.serve.protocol.tensors import aligned_bytes, body_buffer
from exportkit.serve.statuses import BadRequestError, CancelledError, SlowClientError, TooLargeError

_LARGEST_SMALL = 1 << 20  # bytes of the body of a small request, at most
_FIRST_SIZE = 64 << 10  # bytes of the buffer of a body whose size is not known


@dataclass(frozen=True)
class BodyHead:
    """What the headers say about a body.

    Attributes:
        sent: The bytes that will be sent, compressed or not. None: it comes in chunks until it ends.
        coding: How it is compressed.
        json_length: The bytes of JSON at its beginning, decompressed. None: all is JSON.
    """

    sent: int | None
    coding: Coding | None
    json_length: int | None

    @classmethod
    def of(cls, scope: Scope) -> BodyHead:
        """Reads the headers.

        Raises:
            BadRequestError: A length is not a number.
            UnknownEncodingError: The content encoding is not understood.
        """
        headers = headers_of(scope)
        return cls(
            _content_length(headers),
            coding_of_body(headers.get("content-encoding")),
            header_length_of(headers.get("inference-header-content-length")),
        )

    @property
    def size(self) -> int | None:
        """The bytes of the body, decompressed, if they are known before it is read."""
        return self.sent if self.coding is None else None


def _content_length(headers: Mapping[str, str]) -> int | None:
    if "transfer-encoding" in headers:
        return None
    return number_of_bytes("Content-Length", headers.get("content-length", "0"))


async def read_body(
    scope: Scope,
    receive: Receive,
    head: BodyHead,
    limit: int,
    options: HttpOptions,
    reserve: Callable[[int], None],
) -> memoryview:
    """Receives a body.

    Args:
        scope: The request.
        receive: ASGI's.
        head: What the headers say.
        limit: The most bytes that the body may have, as they are sent and decompressed.
        options: How slow it may come.
        reserve: Called with a number of bytes before that much more memory is used. It may refuse. Where the size is
            known, it was reserved before.

    Returns:
        The body, decompressed, in memory that `body_buffer` chose.

    Raises:
        TooLargeError: The body is larger than `limit`. No more of it was read than that.
        SlowClientError: It comes too slowly.
        CancelledError: The client went away.
        BadRequestError: The compressed data is wrong, or the body is not as long as Content-Length says.
    """
    fill = scope.get("extensions", {}).get(FILL)
    if (head.sent or 0) > limit:
        raise too_large(limit)
    if fill is not None and head.size is not None:
        memory = body_buffer(head.size, head.json_length)
        with _slow_bodies_refused(options) as clock:
            if not await fill(memory, clock.received):
                raise _client_left()
        return memory
    return await _read_chunks(receive, head, limit, options, reserve)


async def _read_chunks(
    receive: Receive, head: BodyHead, limit: int, options: HttpOptions, reserve: Callable[[int], None]
) -> memoryview:
    """Receives a body whose size is not known before, or from a server that has no `fill`."""
    buffer = _Buffer(head, limit, reserve)
    inflater = None if head.coding is None else Inflater(head.coding)
    received, more = 0, True
    with _slow_bodies_refused(options) as clock:
        while more:
            clock.start_waiting()
            chunk, more = _chunk(await receive())
            clock.stop_waiting(len(chunk))
            received += len(chunk)
            if received > limit:
                raise too_large(limit)
            if inflater is None:
                buffer.write(chunk)
            else:
                for piece in inflater.pieces(chunk):
                    buffer.write(piece)
                    await asyncio.sleep(0)  # a small chunk can inflate to much: others get their turn
    if inflater is not None:
        inflater.end()
    if head.sent is not None and received != head.sent:
        raise BadRequestError(f"the body has {received} bytes, and its header Content-Length says {head.sent}")
    return buffer.filled


async def read_small_body(scope: Scope, receive: Receive, options: HttpOptions) -> memoryview:
    """Receives the body of a request that is no inference. Returns and raises what `read_body` does."""

    def reserve(size: int) -> None:
        """Reserves nothing, because the body is small."""

    return await read_body(scope, receive, BodyHead.of(scope), _LARGEST_SMALL, options, reserve)


def too_large(limit: int) -> TooLargeError:
    """Returns the error for a body of more than `limit` bytes."""
    return TooLargeError(f"the body has more than {limit} bytes, which no request for this URL needs")


def _chunk(message: Message) -> tuple[bytes, bool]:
    if message["type"] == "http.disconnect":
        raise _client_left()
    return message.get("body", b""), message.get("more_body", False)


def _client_left() -> CancelledError:
    """Returns the error for a client that went away before its request was complete."""
    return CancelledError("the client went away before its request was complete")


class _Buffer:
    """The body's memory, which grows where its size is not known before."""

    def __init__(self, head: BodyHead, limit: int, reserve: Callable[[int], None]) -> None:
        self._start = head.json_length or 0
        self._limit = limit
        self._reserve = reserve
        self._fixed = head.size is not None
        if head.size is not None:
            self._memory = body_buffer(head.size, head.json_length)
        else:
            self._memory = aligned_bytes(min(_FIRST_SIZE, limit), self._start)
        self._used = 0

    def write(self, data: bytes) -> None:
        end = self._used + len(data)
        if end > len(self._memory):
            self._grow(end)
        self._memory[self._used : end] = data
        self._used = end

    def _grow(self, needed: int) -> None:
        if self._fixed:
            raise BadRequestError(f"the body has more bytes than its header Content-Length says: {len(self._memory)}")
        if needed > self._limit:
            raise too_large(self._limit)
        size = min(max(2 * len(self._memory), needed), self._limit)
        self._reserve(size - len(self._memory))
        grown = aligned_bytes(size, self._start)
        grown[: self._used] = self._memory[: self._used]
        self._memory = grown

    @property
    def filled(self) -> memoryview:
        return self._memory[: self._used]


class BodyClock:
    """Tells when a body comes too slowly. Only the time spent waiting for the client counts."""

    def __init__(self, options: HttpOptions, late: Callable[[], None]) -> None:
        """Waits for the client from now on. `late` is called once it is too slow, unless the clock ended before."""
        self._options = options
        self._late = late
        self._loop = asyncio.get_running_loop()
        self._waits_since: float | None = self._loop.time()
        self._waited = 0.0
        self._received = 0
        self._timer = self._loop.call_later(options.idle_seconds, self._check)

    def start_waiting(self) -> None:
        """The server waits for the client from now on."""
        self._waits_since = self._loop.time()

    def stop_waiting(self, size: int) -> None:
        """So many bytes came, and the server works on them now."""
        if self._waits_since is not None:
            self._waited += self._loop.time() - self._waits_since
        self._waits_since = None
        self._received += size

    def received(self, size: int) -> None:
        """So many bytes came, and the server waits for more."""
        self.stop_waiting(size)
        self.start_waiting()

    def end(self) -> None:
        """Nothing more is waited for."""
        self._timer.cancel()

    def error(self) -> SlowClientError:
        """Returns the error for a client that is late."""
        idle, rate = self._options.idle_seconds, self._options.least_rate
        return SlowClientError(
            f"the body comes too slowly: {self._received} bytes came",
            hint=f"It may pause for {idle:g} seconds, and needs {rate:g} bytes a second after the first {idle:g}.",
        )

    def _check(self) -> None:
        """Checks whether the client is late, and when it would be."""
        idle = self._options.idle_seconds
        left = idle
        if self._waits_since is not None:
            waits = self._loop.time() - self._waits_since
            allowed = idle + self._received / self._options.least_rate
            left = min(idle - waits, allowed - self._waited - waits)
        if left > 0:
            self._timer = self._loop.call_later(left, self._check)
        else:
            self._late()


@contextmanager
def _slow_bodies_refused(options: HttpOptions) -> Iterator[BodyClock]:
    """Raises SlowClientError in the task once the body comes too slowly."""
    task, late = asyncio.current_task(), False
    assert task is not None

    def cancel() -> None:
        nonlocal late
        late = True
        task.cancel()

    clock = BodyClock(options, cancel)
    try:
        yield clock
    except asyncio.CancelledError:
        if not late:
            raise
        task.uncancel()
        raise clock.error() from None
    finally:
        clock.end()
