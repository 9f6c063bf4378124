"""One HTTP request to the application: ASGI's messages, and what the application asks beyond them."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import Protocol

from starlette.types import ASGIApp, Message, Scope

from exportkit.serve.http.exchange import FILL, WATCH

_COPIED = 64 << 10  # bytes of a body up to which it is copied behind the head
_BROKEN = re.compile(rb"[\0\r\n]")  # in a header it would begin another
_NO_BODY = frozenset([204, 304])
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

_log = logging.getLogger(__name__)


class AnsweredConnection(Protocol):
    """What a request asks of its connection: `HttpConnection` says what each does."""

    transport: asyncio.Transport

    def resume_reading(self) -> None:
        """Receives more of the body, or sees the client go away."""

    def fill(
        self, memory: memoryview, came: Callable[[int], None], over: Callable[[bool], None], /
    ) -> Callable[[], None]:
        """Fills memory with what comes next."""

    async def drain(self) -> None:
        """Waits until the client took most of what was written."""

    def answered(self) -> None:
        """The request that is answered is over."""


class AsgiRequest:
    """A request and its answer.

    Attributes:
        scope: ASGI's.
        keep_alive: Whether the connection stays open after the answer.
        body: What came of the body and was not asked for yet.
        received: The bytes of the body that the parser saw.
        more_body: Whether more of the body comes.
        started: Whether the answer has begun.
        answered: Whether it is complete.
        disconnected: Whether the client went away before.
    """

    def __init__(self, connection: AnsweredConnection, scope: Scope, *, keep_alive: bool, expects: bool) -> None:
        """`expects`: the client asks before it sends the body."""
        self.scope = scope
        self.keep_alive = keep_alive
        self.body = bytearray()
        self.received = 0
        self.more_body = True
        self.started = self.answered = self.disconnected = False
        self._connection = connection
        self._expects = expects
        self._changed = asyncio.Event()
        self._gone: Callable[[], None] | None = None  # what the application does when the client goes away
        self._left: int | None = None  # bytes of the answer's body that are missing; None: it says itself where it ends
        self._chunked = False

    async def run(self, application: ASGIApp) -> None:
        """Lets the application answer."""
        self.scope["extensions"] = {FILL: self._fill, WATCH: self.watch}
        try:
            await application(self.scope, self._receive, self.send)
            if not (self.started or self.disconnected):
                raise RuntimeError("the application did not answer")
        except Exception:  # whatever it is, the client must not wait for ever
            _log.exception("a request failed")
            if not self.started:
                headers = [(b"content-length", b"0"), (b"connection", b"close")]
                await self.send({"type": "http.response.start", "status": 500, "headers": headers})
                await self.send({"type": "http.response.body"})
        finally:
            if not self.answered:  # an answer that ends too early must not look like a whole one
                self._connection.transport.close()

    # --- what the connection tells ------------------------------------------------------------------------------------

    def came(self, data: bytes) -> None:
        """More of the body came."""
        self.received += len(data)
        if not self.answered:
            self.body += data
            self._changed.set()

    def complete(self) -> None:
        """The body is complete."""
        self.more_body = False
        self._changed.set()

    def disconnect(self) -> None:
        """The client went away."""
        self.disconnected = not self.answered
        self._changed.set()
        if self._gone is not None:
            self._gone()

    # --- what the application asks ------------------------------------------------------------------------------------

    def watch(self, gone: Callable[[], None] | None) -> bool:
        """Waits for the end of the connection: see exportkit.serve.http.exchange.Watch."""
        self._gone = gone
        if gone is not None:
            self._connection.resume_reading()  # otherwise the end is not seen
        return not self.disconnected

    def _go_on(self) -> None:
        """Tells a client that asks before it sends to send."""
        if self._expects and not self._connection.transport.is_closing():
            self._connection.transport.write(_CONTINUE)
        self._expects = False

    async def _receive(self) -> Message:
        self._go_on()
        if not (self.disconnected or self.answered):
            self._connection.resume_reading()
            await self._changed.wait()
            self._changed.clear()
        if self.disconnected or self.answered:
            return {"type": "http.disconnect"}
        body, self.body = bytes(self.body), bytearray()
        return {"type": "http.request", "body": body, "more_body": self.more_body}

    async def _fill(self, memory: memoryview, came: Callable[[int], None]) -> bool:
        """Receives the body without the parser: see exportkit.serve.http.exchange.Fill."""
        if not self.more_body or self.disconnected:
            self._taken(memory, came)
            return not self.more_body
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def over(whole: bool) -> None:
            if not done.done():  # else the task was cancelled
                done.set_result(whole)

        rest = self._taken(memory, came)
        self._connection.resume_reading()
        stop = self._connection.fill(rest, came, over)
        try:
            return await done
        except asyncio.CancelledError:
            stop()
            raise

    def _taken(self, memory: memoryview, came: Callable[[int], None]) -> memoryview:
        """Puts what came of the body into memory. Returns the memory of the rest."""
        self._go_on()
        start = len(self.body)
        memory[:start] = self.body
        self.body = bytearray()
        came(start)
        return memory[start:]

    async def send(self, message: Message) -> None:
        """Sends a part of the answer."""
        await self._connection.drain()
        if self.disconnected:
            return
        if message["type"] == "http.response.start":
            self._send_head(message)
        else:
            self._send_body(message.get("body", b""), message.get("more_body", False))

    def _send_head(self, message: Message) -> None:
        if self.started:
            raise RuntimeError("the answer has begun already")
        status = message["status"]
        lines = [_status_line(status), _date(int(time.time()))]
        for name, value in message.get("headers", ()):
            if _BROKEN.search(name) or _BROKEN.search(value):
                raise RuntimeError(f"the header {name!r} would have several lines")
            name = name.lower()
            if name == b"connection":
                self.keep_alive = self.keep_alive and b"close" not in value.lower()
                continue
            if name == b"content-length":
                self._left = int(value)
            lines.append(b"%b: %b\r\n" % (name, value))
        self._bodyless = self.scope["method"] == "HEAD" or status in _NO_BODY
        if self._bodyless:
            self._left = 0
        elif self._left is None and self.scope["http_version"] == "1.1":
            self._chunked = True
            lines.append(b"transfer-encoding: chunked\r\n")
        elif self._left is None:
            self.keep_alive = False
        lines.append(b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n")
        self.started = True
        self._expects = False
        self._writer = HeadFirst(self._connection.transport, b"".join(lines))

    def _send_body(self, body: bytes | memoryview, more: bool) -> None:
        if not self.started or self.answered:
            raise RuntimeError("the answer has not begun, or is over")
        if self._bodyless:
            body = b""
        if self._chunked:
            chunk = b"%x\r\n%b\r\n" % (len(body), bytes(body)) if body else b""
            self._writer.write(chunk if more else chunk + b"0\r\n\r\n")
        else:
            if self._left is not None:
                self._left -= len(body)
                if self._left < 0 or (self._left and not more):
                    raise RuntimeError("the answer is not as long as its Content-Length")
            self._writer.write(body)
        if more:
            return
        self.answered = True
        self._changed.set()
        self._writer.flush()
        if not self.keep_alive:
            self._connection.transport.close()
        self._connection.answered()


class HeadFirst:
    """Writes the head of an answer together with the beginning of its body.

    uvloop sends what is written at once: two writes are two system calls, during which no other thread of Python runs,
    and two packets that wake the client. So the head waits for the body, but not for longer than the rest of the event
    loop's tick.
    """

    def __init__(self, transport: asyncio.Transport, head: bytes) -> None:
        """Writes the head soon."""
        self._transport = transport
        self._head: bytes | None = head
        asyncio.get_running_loop().call_soon(self.flush)

    def write(self, data: bytes | memoryview) -> None:
        """Writes a part of the body at once."""
        if self._head is None:
            if data:
                self._transport.write(data)
        elif data:
            head, self._head = self._head, None
            if len(data) <= _COPIED:
                self._transport.write(head + data)
            else:
                self._transport.writelines([head, data])

    def flush(self) -> None:
        """Writes the head if it still waits."""
        head, self._head = self._head, None
        if head is not None:
            self._transport.write(head)


@lru_cache
def _status_line(status: int) -> bytes:
    return f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n".encode()


@lru_cache(maxsize=1)
def _date(second: int) -> bytes:
    return f"date: {formatdate(second, usegmt=True)}\r\n".encode()
