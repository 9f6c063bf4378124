"""One HTTP request and its answer: where its body comes from, what was read and sent, and how a refusal is sent."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import msgspec
from starlette.types import Message, Receive, Scope, Send

from exportkit.serve.request_record import RequestRecord, request_id
from exportkit.serve.statuses import CancelledError, ServeError, SlowClientError, UnknownEncodingError

JSON = (b"content-type", b"application/json")
_IGNORED_BYTES = 64 << 20  # a refused body up to this size is received and thrown away, and the connection stays open

_log = logging.getLogger(__name__)

Fill = Callable[[memoryview, Callable[[int], None]], Awaitable[bool]]
"""Fills memory with the body, which has exactly as many bytes, and calls the function for each part with its size.

So the body is copied once, where ASGI's messages are copied six times on their way. Returns False if the client went
away before. If the task is cancelled, `receive` returns what came since it began and the rest.
"""

FILL = "exportkit.fill"
"""The name of a `Fill` in `scope["extensions"]`. Only a server that can has it."""

Watch = Callable[[Callable[[], None] | None], bool]
"""Calls the function once the client goes away, without a task that waits for it; None ends that.

Returns whether the client is there.
"""

WATCH = "exportkit.watch"
"""The name of a `Watch` in `scope["extensions"]`. Only a server that can has it."""


@dataclass(frozen=True)
class HttpOptions:
    """How the application treats its clients.

    Attributes:
        idle_seconds: A body may pause for so long.
        least_rate: Bytes a second that a body must have on average after the first `idle_seconds`.
        linger_seconds: How long a client may go on sending after it was refused, before the connection is closed.
    """

    idle_seconds: float = 20.0
    least_rate: float = 16384.0
    linger_seconds: float = 2.0


def headers_of(scope: Scope) -> dict[str, str]:
    """Returns a request's headers by lower-case name. Of a header that is there twice, the last.

    The scope keeps them, because several of those who see the request ask for them.
    """
    known: dict[str, str] | None = scope.get("exportkit.headers")
    if known is None:
        known = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        scope["exportkit.headers"] = known
    return known


class Exchange:
    """One request and its answer. `receive` and `send` are ASGI's, and count. So does the server's `fill`.

    Attributes:
        headers: The request's headers.
        record: What is known about the request.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, options: HttpOptions) -> None:
        """Nothing was read and nothing sent."""
        self._scope = scope
        self._receive = receive
        self._send = send
        self._options = options
        self.headers = headers_of(scope)
        self.record: RequestRecord = scope.setdefault("exportkit", RequestRecord())
        self.record.id = request_id(self.record.id or self.headers.get("x-request-id"))
        self._unread = "transfer-encoding" in self.headers or self.headers.get("content-length", "0") != "0"
        extensions = scope.get("extensions") or {}
        self._fill: Fill | None = extensions.get(FILL)
        if self._fill is not None:
            scope["extensions"] = {**extensions, FILL: self.fill}

    async def receive(self) -> Message:
        """Receives a part of the body, or that the client went away."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self._unread = False
        else:
            self._unread = message.get("more_body", False)
            self.record.received_bytes += len(message.get("body", b""))
        return message

    async def fill(self, memory: memoryview, came: Callable[[int], None]) -> bool:
        """Receives the whole body."""
        assert self._fill is not None  # nobody else is told of this method

        def count(size: int) -> None:
            self.record.received_bytes += size
            came(size)

        whole = await self._fill(memory, count)
        self._unread = False
        return whole

    async def send(self, message: Message) -> None:
        """Sends a part of the answer. Every answer has the request's id, and none to HEAD has a body."""
        if message["type"] == "http.response.start":
            self.record.status = message["status"]
            headers = [*message.get("headers", ()), (b"x-request-id", self.record.id.encode())]
            await self._deliver({**message, "headers": headers})
            return
        body = message.get("body", b"")
        if self._scope["method"] == "HEAD":
            message = {**message, "body": b""}
        else:
            self.record.sent_bytes += len(body)
        await self._deliver(message)

    async def _deliver(self, message: Message) -> None:
        try:
            await self._send(message)
        except OSError as error:  # ours ignores what it cannot send; other servers say so
            raise CancelledError("the client went away before it had its answer") from error

    def end(self) -> None:
        """No more of the body is read by `fill`, which would keep the request alive in a reference cycle."""
        self._fill = None
        self._scope.pop("extensions", None)

    async def refuse(self, error: ServeError, headers: Mapping[str, str] | None = None) -> None:
        """Answers with an error. An answer that has begun already is left incomplete, and the server disconnects."""
        began = self.record.status != 0
        self.record.failed(error)
        if isinstance(error, CancelledError):  # nobody waits for the answer
            return
        if began:
            _log.error("request %s failed while its answer was sent: %s", self.record.id, error.text)
            return
        with contextlib.suppress(CancelledError):
            await self._send_refusal(error, headers or {})

    async def _send_refusal(self, error: ServeError, headers: Mapping[str, str]) -> None:
        text = error.text.encode(errors="replace").decode()  # a URL may hold what UTF-8 has no bytes for
        body = msgspec.json.encode({"error": text})
        lines = [JSON, (b"content-length", b"%d" % len(body))]
        lines += [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]
        if error.retry_after is not None:
            lines.append((b"retry-after", b"%d" % error.retry_after))
        if isinstance(error, UnknownEncodingError):
            lines.append((b"accept-encoding", b"gzip, deflate"))
        # A client that sent `Expect: 100-continue` has sent no body and will not.
        asks = "expect" in self.headers and not self.record.received_bytes
        if self._scope["http_version"].startswith("1") and self._unread and (asks or self._is_endless(error)):
            lines.append((b"connection", b"close"))
        lingers = self._unread and not asks
        await self.send({"type": "http.response.start", "status": error.status, "headers": lines})
        await self.send({"type": "http.response.body", "body": body, "more_body": lingers})
        if lingers:
            await self._linger()
            await self.send({"type": "http.response.body", "body": b"", "more_body": False})

    def _is_endless(self, error: ServeError) -> bool:
        """Whether the rest of the body is too long to wait for, or may never end."""
        length = self.headers.get("content-length", "")
        return isinstance(error, SlowClientError) or not length.isdigit() or int(length[:18]) > _IGNORED_BYTES

    async def _linger(self) -> None:
        """Throws away what the client sends, for a moment: a connection closed at once takes the answer with it."""

        async def receive_rest() -> None:
            while self._unread:
                await self.receive()

        try:
            await asyncio.wait_for(receive_rest(), self._options.linger_seconds)
        except TimeoutError:
            _log.info("request %s: the client went on sending after it was refused", self.record.id)
