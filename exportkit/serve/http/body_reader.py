"""Receives the body of a request into one buffer, within limits of size and time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from exportkit.serve.http.content_coding import Coding, Inflater, coding_of_body
from exportkit.serve.http.exchange import HttpOptions
from exportkit.serve.protocol.http_request import body_buffer, header_length_of, number_of_bytes
from exportkit.serve.protocol.tensors import aligned_bytes
from exportkit.serve.statuses import CancelledError, SlowClientError, TooLargeError

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
        headers = Headers(scope=scope)
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
    receive: Receive, head: BodyHead, limit: int, options: HttpOptions, reserve: Callable[[int], None]
) -> memoryview:
    """Receives a body.

    Args:
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
        BadRequestError: The compressed data is wrong.
    """
    if (head.sent or 0) > limit:
        raise too_large(limit)
    buffer = _Buffer(head, limit, reserve)
    inflater = None if head.coding is None else Inflater(head.coding)
    arriving = _Arriving(receive, options)
    while arriving.more:
        chunk = await arriving.chunk()
        if arriving.received > limit:
            raise too_large(limit)
        if inflater is None:
            buffer.write(chunk)
            continue
        for piece in inflater.pieces(chunk):
            buffer.write(piece)
            await asyncio.sleep(0)  # a small chunk can inflate to much: others get their turn
    if inflater is not None:
        inflater.end()
    return buffer.filled


async def read_small_body(scope: Scope, receive: Receive, options: HttpOptions) -> memoryview:
    """Receives the body of a request that is no inference, for which no room is reserved. See `read_body`."""
    return await read_body(receive, BodyHead.of(scope), _LARGEST_SMALL, options, lambda size: None)


def too_large(limit: int) -> TooLargeError:
    """Returns the error for a body of more than `limit` bytes."""
    return TooLargeError(f"the body has more than {limit} bytes, which no request for this URL needs")


class _Arriving:
    """A body that a client sends in time. Only the time spent waiting for the client counts.

    Attributes:
        received: The bytes that came.
        more: Whether more of it comes.
    """

    def __init__(self, receive: Receive, options: HttpOptions) -> None:
        self._receive = receive
        self._options = options
        self._waited = 0.0
        self.received = 0
        self.more = True

    async def chunk(self) -> bytes:
        """Waits for the next part. Raises what `read_body` does."""
        idle, rate = self._options.idle_seconds, self._options.least_rate
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            async with asyncio.timeout(min(idle, idle + self.received / rate - self._waited)):
                message = await self._receive()
        except TimeoutError:
            raise SlowClientError(
                f"the body comes too slowly: {self.received} bytes came",
                hint=f"It may pause for {idle:g} seconds, and needs {rate:g} bytes a second after the first {idle:g}.",
            ) from None
        if message["type"] == "http.disconnect":
            raise CancelledError("the client went away before its request was complete")
        self._waited += loop.time() - began
        chunk: bytes = message.get("body", b"")
        self.received += len(chunk)
        self.more = message.get("more_body", False)
        return chunk


class _Buffer:
    """The body's memory, which grows where its size is not known before."""

    def __init__(self, head: BodyHead, limit: int, reserve: Callable[[int], None]) -> None:
        self._start = head.json_length or 0
        self._limit = limit
        self._reserve = reserve
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
