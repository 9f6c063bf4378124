"""Limits of HTTP connections that uvicorn does not have: their number, the size of headers, and slow clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from exportkit.serve.http.exchange import FILL, WATCH
from exportkit.serve.operations.answer_transport import AnswerTransport
from exportkit.serve.operations.connection_reader import ConnectionReader
from exportkit.serve.statuses import BadRequestError, ServeError, SlowClientError

KEEP_ALIVE_SECONDS = 75
"""An idle connection stays open this long. Load balancers close theirs after 60 seconds, and must be the first."""

_FAREWELL_SECONDS = 1.0


@dataclass(frozen=True)
class ConnectionLimits:
    """What a connection may do.

    Attributes:
        connections: The most connections that are open at the same time.
        header_bytes: The most bytes of a request's line and headers.
        header_seconds: Within these they must have arrived, counted from their first byte.
        idle_seconds: An answer that the client does not take may pause for so long, and so may the rest of a body that
            was refused. (The application sees to the other bodies.)
    """

    connections: int = 1024
    header_bytes: int = 64 << 10
    header_seconds: float = 15.0
    idle_seconds: float = 30.0


Refused = Callable[[str, ServeError], None]
"""Gets the client's address and the error of a refusal that no application sees."""


class TooManyConnectionsError(ServeError):
    """As many connections are open as may be."""

    status, code, reason, retry_after = 503, "UNAVAILABLE", "full", 1


class LargeHeadersError(ServeError):
    """The headers of a request are too large."""

    status, code, reason = 431, "INVALID_ARGUMENT", "invalid"


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol with limits. Its own refusals are JSON, as all others are."""

    def __init__(self, *arguments: Any, limits: ConnectionLimits, refused: Refused, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._limits = limits
        self._refused = refused
        self._timer: asyncio.TimerHandle | None = None
        self._in_headers = True
        self._header_bytes = 0
        self._mixed = False  # whether what came last has the end of one request and the beginning of another
        self._moved = 0.0  # when something came last
        self._gone: Callable[[], None] | None = None  # what the application does when the client goes away
        self._unsent: int | None = None  # the bytes that the client had not taken when we last looked

    # --- the connection ----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvicorn names its own transports
        """Refuses one connection too many."""
        super().connection_made(transport)
        self._reader = ConnectionReader(self, transport)
        if len(self.connections) > self._limits.connections:
            most = self._limits.connections
            self._refuse(TooManyConnectionsError(f"{most} connections are open, which is the most"))
        else:
            self._arm(self._limits.header_seconds, self._header_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the timer, and tells the application."""
        self._disarm()
        super().connection_lost(exc)
        if self._gone is not None:
            self._gone()

    def shutdown(self) -> None:
        """The server ends. A client of TLS that does not answer the end of its connection is not waited for."""
        super().shutdown()
        if self.transport.is_closing():
            self._unsent = self.transport.get_write_buffer_size()
            self._arm(_FAREWELL_SECONDS, self._answer_may_be_stuck)

    def data_received(self, data: bytes) -> None:
        """Counts the bytes of headers. After them, the application says where to the body comes."""
        self._mixed = not self._in_headers
        self._moved = self.loop.time()
        super().data_received(data)
        if self.in_body:
            if not self.cycle.response_complete:
                self.flow.pause_reading()
            return
        self._header_bytes = 1 if self._mixed else self._header_bytes + len(data)
        if self._header_bytes > self._limits.header_bytes:
            self._refuse(LargeHeadersError(f"the headers have more than {self._limits.header_bytes} bytes"))

    def send_400_response(self, msg: str) -> None:
        """Refuses what is not HTTP, in JSON."""
        self._refuse(BadRequestError("the request is not HTTP/1.1"))

    # --- the parser's events -----------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """The first byte of a request came."""
        super().on_message_begin()
        self._in_headers = True
        self._arm(self._limits.header_seconds, self._header_is_late)

    def on_headers_complete(self) -> None:
        """The headers are complete; a body may follow."""
        super().on_headers_complete()
        answer: Any = AnswerTransport(self.transport, self.loop)
        self.cycle.transport = answer
        fill: Any = partial(self._fill, self.cycle)
        watch: Any = partial(self._watch, self.cycle)
        self.scope["extensions"] = {FILL: fill, WATCH: watch}
        self._in_headers, self._header_bytes, self._mixed = False, 0, True
        self._arm(self._limits.idle_seconds, self._rest_may_be_late)

    def on_message_complete(self) -> None:
        """The request is complete. From now on, time passes on our side."""
        super().on_message_complete()
        self._in_headers = True
        self._disarm()

    def pause_writing(self) -> None:
        """The client takes its answer slowly."""
        super().pause_writing()
        self._unsent = self.transport.get_write_buffer_size()
        self._arm(self._limits.idle_seconds, self._answer_may_be_stuck)

    def resume_writing(self) -> None:
        """The client took most of it."""
        super().resume_writing()
        if self._unsent is not None:
            self._unsent = None
            self._disarm()

    # --- a body as a whole -------------------------------------------------------------------------------------------

    async def _fill(self, cycle: RequestResponseCycle, memory: memoryview, came: Callable[[int], None]) -> bool:
        """Receives the body of a request without the parser: see exportkit.serve.http.exchange.Fill."""
        if cycle.waiting_for_100_continue and not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            cycle.waiting_for_100_continue = False
        start = len(cycle.body)
        memory[:start] = cycle.body
        cycle.body = bytearray()
        came(start)
        if not cycle.more_body or cycle.disconnected:
            return not cycle.more_body
        self.flow.resume_reading()
        return await self._reader.fill(memory[start:], came)

    def body_filled(self) -> None:
        """The rest of a body came. The parser has not seen it, so another begins with the next request."""
        self._moved = self.loop.time()
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn has it
        self.on_message_complete()

    def _watch(self, cycle: RequestResponseCycle, gone: Callable[[], None] | None) -> bool:
        """Waits for the end of the connection: see exportkit.serve.http.exchange.Watch."""
        self._gone = gone
        if gone is not None:
            self.flow.resume_reading()  # otherwise the end is not seen
        return not cycle.disconnected

    # --- time ---------------------------------------------------------------------------------------------------------

    def _arm(self, seconds: float, expired: Callable[[], None]) -> None:
        self._disarm()
        self._timer = self.loop.call_later(seconds, expired)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _header_is_late(self) -> None:
        if not self._is_between:  # an earlier request of this connection is being answered
            self._arm(self._limits.header_seconds, self._header_is_late)
        elif self._header_bytes:
            seconds = self._limits.header_seconds
            self._refuse(SlowClientError(f"the headers took longer than {seconds:g} seconds"))
        else:
            self.transport.close()  # nothing was asked

    def _rest_may_be_late(self) -> None:
        idle = self.loop.time() - self._moved
        if not self.cycle.response_complete or idle < self._limits.idle_seconds:
            self._arm(self._limits.idle_seconds, self._rest_may_be_late)
        else:
            self.transport.close()

    def _answer_may_be_stuck(self) -> None:
        unsent = self.transport.get_write_buffer_size()
        if self._unsent is not None and unsent < self._unsent:
            self._unsent = unsent
            self._arm(self._limits.idle_seconds, self._answer_may_be_stuck)
        else:
            self.transport.abort()  # close() would wait for the client to take the rest

    @property
    def in_body(self) -> bool:
        """Whether the parser has seen the head of a request and not the end of its body."""
        return not self._in_headers

    @property
    def _is_between(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _refuse(self, error: ServeError) -> None:
        """Answers instead of the application if nothing was answered yet, and closes the connection."""
        self._disarm()
        if self.transport.is_closing():
            return
        if self._in_headers and self._is_between:
            self._refused(self.client[0] if self.client else "", error)
            self._write(error)
        elif not self._in_headers and not self.pipeline and not self.cycle.response_started:
            self._write(error)  # the application sees a client that went away
        self.transport.close()

    def _write(self, error: ServeError) -> None:
        body = json.dumps({"error": error.text}).encode()
        head = [
            f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            *([] if error.retry_after is None else [f"retry-after: {error.retry_after}"]),
            "connection: close",
        ]
        self.transport.write("\r\n".join(head).encode() + b"\r\n\r\n" + body)
