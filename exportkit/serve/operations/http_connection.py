"""A connection of HTTP/1.1: it parses requests, lets the application answer, and holds its client to the limits."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import unquote

import httptools
from starlette.types import ASGIApp

from exportkit.serve.operations.asgi_request import AsgiRequest
from exportkit.serve.operations.body_filling import BodyFilling
from exportkit.serve.operations.connection_limits import ConnectionLimits, LargeHeadersError, Refused, refusal
from exportkit.serve.operations.deadline import Deadline
from exportkit.serve.statuses import BadRequestError, ServeError, SlowClientError

KEEP_ALIVE_SECONDS = 75
"""An idle connection stays open this long. Load balancers close theirs after 60 seconds, and must be the first."""

_FAREWELL_SECONDS = 1.0
_HEAD_BYTES = 16 << 10  # received at once until the head is complete: bytes of the body among them are copied again
_PART_BYTES = 64 << 10  # received at once of a body that the parser reads
# What a chunked body may have beside its data: the lines of chunks of a byte have 5, and extensions and trailers exist.
_FRAMING_BYTES, _FRAMING_FACTOR = 64 << 10, 8
_OF_A_BODY = (b"content-length", b"transfer-encoding")
# Every connection receives into it, and takes what came out before another does.
_BUFFER = memoryview(bytearray(max(_HEAD_BYTES, _PART_BYTES)))


@dataclass(frozen=True)
class ConnectionSetup:
    """What the connections of a server have in common.

    Attributes:
        app: The application. It needs no lifespan events.
        limits: What a connection may do.
        refused: Is told of refusals that the application does not see.
        connections, tasks: Those that are open, since they were accepted, and the requests that are being answered.
    """

    app: ASGIApp
    limits: ConnectionLimits
    refused: Refused
    connections: set[HttpConnection] = field(default_factory=set)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)


class HttpConnection(asyncio.BufferedProtocol):
    """A connection. Requests that follow one another without waiting are answered in order.

    Attributes:
        transport: The connection itself.
        opened: Whether it has one: with TLS, after the handshake.
    """

    transport: asyncio.Transport
    opened = False

    def __init__(self, setup: ConnectionSetup, refused: ServeError | None = None) -> None:
        """Counts from now on. With `refused` the client is told why it is not served."""
        self._setup = setup
        self._limits = setup.limits
        self._refusal = refused
        self._loop = asyncio.get_running_loop()
        self._deadline = Deadline()
        self._filling: BodyFilling | None = None
        self._request: AsgiRequest | None = None  # whose head came last
        self._running: AsgiRequest | None = None  # that is being answered, or was
        self._begun: AsgiRequest | None = None  # of the running one: its head came in what is parsed now
        self._waiting: deque[AsgiRequest] = deque()
        self._in_head, self._head_began = True, False
        self._head_bytes = 0  # received since a head may have begun
        self._mixed = False  # whether what came last has the end of one request and the beginning of another
        self._framing = 0  # bytes of a chunked body that are none of its data
        self._moved = 0.0  # when something came last
        self._unsent: int | None = None  # the bytes that the client had not taken when we last looked
        self._writable = asyncio.Event()
        self._writable.set()
        self._new_parser()
        setup.connections.add(self)

    def _new_parser(self) -> None:
        self._parser: Any = httptools.HttpRequestParser(self)
        # Otherwise a request that ends the connection would fail for what follows it, and not be answered.
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)

    # --- the connection -----------------------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        """The connection is open."""
        self.transport, self.opened = transport, True
        self._client = _address(transport.get_extra_info("peername"))
        self._server = _address(transport.get_extra_info("sockname"))
        self._scheme = "https" if transport.get_extra_info("sslcontext") else "http"
        if self._refusal is not None:
            self._tell(self._refusal)
            transport.close()
        else:
            self._deadline.set(self._limits.header_seconds, self._head_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the timer, and tells the application."""
        self._deadline.close()
        self._setup.connections.discard(self)
        if self._filling is not None:
            self._filling.end(False)
            self._filling = None
        if self._running is not None:
            self._running.disconnect()
        self._writable.set()
        self._waiting.clear()
        self._parser = None  # which refers to this connection

    def shutdown(self) -> None:
        """The server ends. A client of TLS that does not answer the end of its connection is not waited for."""
        if not self.opened:
            return
        if self._is_between:
            self.transport.close()
            self._unsent = self.transport.get_write_buffer_size()
            self._deadline.set(_FAREWELL_SECONDS, self._answer_may_be_stuck)
        elif self._running is not None:
            self._running.keep_alive = False

    def get_buffer(self, sizehint: int) -> memoryview:
        """Returns the memory for what comes next. A head that has as many bytes as it may gets no more."""
        if self._filling is not None:
            return self._filling.missing
        is_head = self._in_head and self._refusal is None
        most = min(_HEAD_BYTES, self._limits.header_bytes - self._head_bytes) if is_head else _PART_BYTES
        return _BUFFER[:most]

    def buffer_updated(self, nbytes: int) -> None:
        """Takes what came."""
        filling = self._filling
        if filling is None:
            self._feed(bytes(_BUFFER[:nbytes]))
        elif filling.received(nbytes):
            self._filled(filling)
        else:
            filling.goes_on_in_thread(nbytes, partial(self._thread_finished, filling))

    def pause_writing(self) -> None:
        """The client takes its answer slowly."""
        self._writable.clear()
        self._unsent = self.transport.get_write_buffer_size()
        self._deadline.set(self._limits.idle_seconds, self._answer_may_be_stuck)

    def resume_writing(self) -> None:
        """The client took most of it."""
        self._writable.set()
        self._unsent = None
        self._wait_for_client()

    # --- the parser's events ------------------------------------------------------------------------------------------

    def _feed(self, data: bytes) -> None:
        """Parses what came, and begins to answer the request whose turn it is, if its head came."""
        try:
            self._parse(data)
        finally:
            begun, self._begun = self._begun, None
            if begun is not None:
                self._start(begun)

    def _parse(self, data: bytes) -> None:
        """Parses what came. After a head or a part of a body, the application says where to the rest comes."""
        if self._refusal is not None:
            return
        self._moved = self._loop.time()
        self._mixed = began_in_body = not self._in_head
        earlier = self._request
        before = earlier.received if earlier is not None else 0
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if upgrade.args[0] < len(data):  # it has gone over to another protocol without being asked to
                self._refuse(BadRequestError("the request is not HTTP/1.1"))
            return
        except httptools.HttpParserError as error:
            reason = error.__context__
            self._refuse(reason if isinstance(reason, ServeError) else BadRequestError("the request is not HTTP/1.1"))
            return
        if self._in_head:
            self._head_bytes = 0 if self._mixed else self._head_bytes + len(data)
            if self._head_bytes >= self._limits.header_bytes:
                self._refuse(self._large_head())
            return
        request = self._request
        assert request is not None
        same_body = began_in_body and request is earlier
        if same_body:
            self._framing += len(data) - (request.received - before)
            if self._framing > _FRAMING_BYTES + _FRAMING_FACTOR * request.received:
                self._refuse(BadRequestError("the body has more lines of chunks and trailers than data"))
                return
        # A part of a chunked body may hold none of its data. Nobody would ask for more after such a part.
        if (request.body or not same_body) and not request.answered:
            self.transport.pause_reading()

    def on_message_begin(self) -> None:
        """The first byte of a request came."""
        self._in_head = self._head_began = True
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._field_bytes = 0
        self._expects = False
        self._wait_for_client()

    def on_url(self, url: bytes) -> None:
        """A part of the URL came."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header came, or a trailer, which nobody asks for."""
        if not self._in_head:
            return
        self._field_bytes += len(name) + len(value) + 4
        if self._field_bytes + len(self._url) > self._limits.header_bytes:
            raise self._large_head()
        name = name.lower()
        self._headers.append((name, value))
        self._expects |= name == b"expect" and value.lower() == b"100-continue"

    def on_headers_complete(self) -> None:
        """The headers are complete; a body may follow."""
        version = self._parser.get_http_version()
        if version not in ("1.0", "1.1"):
            raise BadRequestError("the request is not HTTP/1.1")
        if self._parser.should_upgrade() and any(name in _OF_A_BODY for name, _ in self._headers):
            # The parser would take the body for the other protocol.
            raise BadRequestError("a request with a body offers another protocol", hint="Send no header Upgrade.")
        url = httptools.parse_url(self._url)
        path = url.path.decode("ascii")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": version,
            "method": self._parser.get_method().decode("ascii"),
            "scheme": self._scheme,
            "path": unquote(path) if "%" in path else path,
            "raw_path": url.path,
            "query_string": url.query or b"",
            "root_path": "",
            "headers": self._headers,
            "client": self._client,
            "server": self._server,
        }
        keep_alive = version == "1.1" and self._parser.should_keep_alive()
        self._request = AsgiRequest(self, scope, keep_alive=keep_alive, expects=self._expects)
        self._in_head, self._head_began, self._mixed = False, False, True
        self._head_bytes = self._framing = 0
        self._wait_for_client()
        if self._is_between:
            self._running = self._begun = self._request
        else:
            self.transport.pause_reading()
            self._waiting.append(self._request)

    def on_body(self, data: bytes) -> None:
        """A part of the body came."""
        assert self._request is not None
        self._request.came(data)

    def on_message_complete(self) -> None:
        """The request is complete. From now on, time passes on our side."""
        self._in_head = True
        if self._request is not None:
            self._request.complete()
        self._wait_for_client()

    # --- what a request asks of its connection ------------------------------------------------------------------------

    def resume_reading(self) -> None:
        """Receives more of the body, or sees the client go away."""
        self.transport.resume_reading()

    async def drain(self) -> None:
        """Waits until the client took most of what was written."""
        if not self._writable.is_set():
            await self._writable.wait()

    def answered(self) -> None:
        """The request that is answered is over. The next one may have come already."""
        if self.transport.is_closing():
            return
        if self._waiting:
            self._running = self._waiting.popleft()
            self._start(self._running)
        elif self._refusal is not None:
            self._refuse(self._refusal)
            return
        else:
            self._wait_for_client()
        self.transport.resume_reading()

    def _start(self, request: AsgiRequest) -> None:
        """Lets the application answer a request."""
        task = self._loop.create_task(request.run(self._setup.app))
        self._setup.tasks.add(task)
        task.add_done_callback(self._setup.tasks.discard)

    # --- bodies that go into memory -----------------------------------------------------------------------------------

    def fill(self, memory: memoryview, came: Callable[[int], None], over: Callable[[bool], None]) -> Callable[[], None]:
        """Fills memory with what comes next. What follows it stays unread.

        Args:
            memory: Where to.
            came: Called for each part with its size.
            over: Called once the memory is full (True), or the client went away before (False).

        Returns:
            What ends it before: the parser goes on with what came.
        """
        self._filling = filling = BodyFilling(self.transport, memory, came, over)
        return partial(self._stop_filling, filling)

    def _stop_filling(self, filling: BodyFilling) -> None:
        filling.wanted = False
        if not filling.in_thread:
            self._parse_filling(filling)

    def _filled(self, filling: BodyFilling) -> None:
        """The rest of a body came. The parser has not seen it, so another begins with the next request."""
        self._filling = None
        self._moved = self._loop.time()
        self._new_parser()
        self.on_message_complete()
        filling.end(True)

    def _parse_filling(self, filling: BodyFilling) -> None:
        if self._filling is filling:
            self._filling = None
            if filling.size and not self.transport.is_closing():
                self._feed(bytes(filling.memory[: filling.size]))

    def _thread_finished(self, filling: BodyFilling, thread: asyncio.Future[int]) -> None:
        filling.in_thread = False
        if self._filling is not filling:  # the connection was closed
            return
        self.transport.resume_reading()
        size = thread.result()
        if size and filling.received(size):
            self._filled(filling)
        elif not filling.wanted:
            self._parse_filling(filling)

    # --- time ---------------------------------------------------------------------------------------------------------

    def _wait_for_client(self) -> None:
        """Gives the client its time for what it has to do next."""
        if self._unsent is not None:  # first it takes its answer
            return
        if not self._in_head:
            self._deadline.set(self._limits.idle_seconds, self._rest_may_be_late)
        elif self._head_began:
            self._deadline.set(self._limits.header_seconds, self._head_is_late)
        elif self._is_between:
            self._deadline.set(KEEP_ALIVE_SECONDS, self.transport.close)
        else:
            self._deadline.clear()

    def _head_is_late(self) -> None:
        if not self._is_between:  # an earlier request of this connection is being answered
            self._deadline.set(self._limits.header_seconds, self._head_is_late)
        elif self._head_began:
            seconds = self._limits.header_seconds
            self._refuse(SlowClientError(f"the headers took longer than {seconds:g} seconds"))
        else:
            self.transport.close()  # nothing was asked

    def _rest_may_be_late(self) -> None:
        idle = self._loop.time() - self._moved
        if not self._is_between or idle < self._limits.idle_seconds:
            self._deadline.set(self._limits.idle_seconds, self._rest_may_be_late)
        else:
            self.transport.close()

    def _answer_may_be_stuck(self) -> None:
        unsent = self.transport.get_write_buffer_size()
        if self._unsent is not None and unsent < self._unsent:
            self._unsent = unsent
            self._deadline.set(self._limits.idle_seconds, self._answer_may_be_stuck)
        else:
            self.transport.abort()  # close() would wait for the client to take the rest

    # --- refusals -----------------------------------------------------------------------------------------------------

    @property
    def _is_between(self) -> bool:
        return self._running is None or self._running.answered

    def _large_head(self) -> LargeHeadersError:
        return LargeHeadersError(f"the headers have more than {self._limits.header_bytes} bytes")

    def _refuse(self, error: ServeError) -> None:
        """Answers instead of the application if nothing was answered yet, and closes the connection."""
        if self.transport.is_closing():
            return
        if not self._in_head:
            if not self._waiting and self._request is not None and not self._request.started:
                self.transport.write(refusal(error))
            self.transport.close()  # the application sees a client that went away
            return
        self._refusal = error  # whatever comes is thrown away from now on
        if not self._is_between:  # what came before is answered first
            self.transport.pause_reading()
            return
        self._tell(error)
        if not self.transport.can_write_eof():
            self.transport.close()
            return
        # What a client sends to a closed connection resets it, and may take the answer away.
        self.transport.write_eof()
        self.transport.resume_reading()
        self._deadline.set(_FAREWELL_SECONDS, self.transport.abort)

    def _tell(self, error: ServeError) -> None:
        self._setup.refused(self._client[0] if self._client else "", error)
        self.transport.write(refusal(error))


def _address(name: Any) -> tuple[str, int] | None:
    """Returns the host and port of a socket's name, if it has them."""
    return (str(name[0]), int(name[1])) if isinstance(name, tuple) else None
