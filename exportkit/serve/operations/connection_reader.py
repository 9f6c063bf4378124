"""Receives what a client sends: heads for the parser, bodies into memory that the application chose."""

from __future__ import annotations

import asyncio
import os
import select
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

_HEAD_BYTES = 16 << 10  # received at once until the head is complete: bytes of the body among them are copied again
_PART_BYTES = 64 << 10  # received at once of a body that the parser reads
_LARGE = 4 << 20  # bytes of a body that are missing, from which another thread receives it
_FAST = 128 << 10  # bytes that came at once, by which a client is fast enough for that
_PAUSE = 2  # milliseconds without data after which the event loop waits for the client, and no thread
_TURN = 0.1  # seconds after which the event loop looks at a fast client, too
_NOTHING = memoryview(b"")


class Connection(Protocol):
    """The HTTP protocol of a connection."""

    @property
    def in_body(self) -> bool:
        """Whether the parser has seen the head of a request and not the end of its body."""

    def data_received(self, data: bytes) -> None:
        """The parser reads."""

    def body_filled(self) -> None:
        """A body is complete that the parser has not seen."""

    def eof_received(self) -> None:
        """The client sends no more."""

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection was closed."""

    def pause_writing(self) -> None:
        """The client takes its answer slowly."""

    def resume_writing(self) -> None:
        """The client took most of it."""


class _Body:
    """A body on its way into memory."""

    def __init__(self, memory: memoryview, came: Callable[[int], None]) -> None:
        self.memory = memory
        self.size = 0
        self.came = came
        self.done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.wanted = True

    @property
    def missing(self) -> memoryview:
        return self.memory[self.size :]

    def end(self, whole: bool) -> None:
        self.wanted = False
        if not self.done.done():
            self.done.set_result(whole)


class ConnectionReader(asyncio.BufferedProtocol):
    """The transport's protocol, which receives for an HTTP protocol.

    The rest of a large body is received in another thread, as long as its client sends without a pause. One thread
    receives about 3 GB a second, and whoever else needs the event loop would wait.
    """

    def __init__(self, connection: Connection, transport: asyncio.Transport) -> None:
        """Becomes the transport's protocol."""
        self._connection = connection
        self._transport = transport
        self._encrypted = transport.get_extra_info("ssl_object") is not None
        self._head = _NOTHING
        self._body: _Body | None = None
        self._away = False  # whether another thread receives
        transport.set_protocol(self)

    async def fill(self, memory: memoryview, came: Callable[[int], None]) -> bool:
        """Fills memory with what comes next. What follows it stays unread.

        If the task is cancelled, the parser goes on with what came.

        Args:
            memory: Where to.
            came: Called for each part with its size.

        Returns:
            Whether the memory is full; False: the client went away before.
        """
        self._body = body = _Body(memory, came)
        try:
            return await body.done
        except asyncio.CancelledError:
            body.wanted = False
            if not self._away:
                self._let_the_parser_go_on()
            raise

    def get_buffer(self, sizehint: int) -> memoryview:
        """Returns the memory for what comes next."""
        if self._body is not None:
            return self._body.missing
        self._head = memoryview(bytearray(_PART_BYTES if self._connection.in_body else _HEAD_BYTES))
        return self._head

    def buffer_updated(self, nbytes: int) -> None:
        """Takes what came."""
        body = self._body
        if body is None:
            data, self._head = bytes(self._head[:nbytes]), _NOTHING
            self._connection.data_received(data)
            return
        self._count(body, nbytes)
        if nbytes >= _FAST and len(body.missing) >= _LARGE and not self._encrypted:
            self._send_away(body)

    def eof_received(self) -> None:
        """The client sends no more."""
        self._connection.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection was closed."""
        self._connection.connection_lost(exc)
        if self._body is not None:
            self._body.end(False)
            self._body = None

    def pause_writing(self) -> None:
        """The client takes its answer slowly."""
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        """The client took most of it."""
        self._connection.resume_writing()

    def _count(self, body: _Body, size: int) -> None:
        body.size += size
        body.came(size)
        if body.size == len(body.memory):
            self._body = None
            self._connection.body_filled()
            body.end(True)

    def _let_the_parser_go_on(self) -> None:
        body, self._body = self._body, None
        if body is not None and not self._transport.is_closing():
            self._connection.data_received(bytes(body.memory[: body.size]))

    def _send_away(self, body: _Body) -> None:
        """Lets another thread receive for a while."""
        try:
            # The connection may be closed meanwhile, and another opened with the same number.
            descriptor = os.dup(self._transport.get_extra_info("socket").fileno())
        except OSError:  # as many files are open as may be
            return
        self._transport.pause_reading()
        self._away = True
        away = asyncio.get_running_loop().run_in_executor(None, _receive, descriptor, body)
        away.add_done_callback(partial(self._is_back, body))

    def _is_back(self, body: _Body, away: asyncio.Future[int]) -> None:
        self._away = False
        if self._body is not body:  # the connection was closed
            return
        self._transport.resume_reading()
        if size := away.result():
            self._count(body, size)
        if self._body is body and not body.wanted:
            self._let_the_parser_go_on()


def _receive(descriptor: int, body: _Body) -> int:
    """Receives what comes without a pause, and closes the descriptor. Returns the bytes that came.

    The end of the connection and errors are left to the event loop, which meets them again.
    """
    missing, size, until = body.missing, 0, time.monotonic() + _TURN
    waiting = select.poll()
    waiting.register(descriptor, select.POLLIN)
    try:
        while size < len(missing) and body.wanted and time.monotonic() < until:
            try:
                count = os.readv(descriptor, [missing[size:]])
            except BlockingIOError:
                if not waiting.poll(_PAUSE):
                    break
                continue
            except OSError:
                break
            if not count:
                break
            size += count
    finally:
        os.close(descriptor)
    return size
