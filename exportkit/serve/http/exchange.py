"""One HTTP request and its answer: what was read and sent of it, and how it is refused."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from exportkit.serve.request_record import RequestRecord, request_id
from exportkit.serve.statuses import (
    CancelledError,
    ServeError,
    SlowClientError,
    UnauthorizedError,
    UnknownEncodingError,
)

JSON = (b"content-type", b"application/json")
_LINGER_SECONDS = 2.0  # that a client may go on sending after it was refused

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HttpOptions:
    """How the application treats its clients.

    Attributes:
        idle_seconds: A body may pause for so long.
        least_rate: Bytes a second that a body must have on average after the first `idle_seconds`.
    """

    idle_seconds: float = 20.0
    least_rate: float = 16384.0


class Exchange:
    """One request and its answer. `receive` and `send` are ASGI's, and count.

    Attributes:
        headers: The request's headers.
        record: What is known about the request.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Nothing was read and nothing sent."""
        self._is_head = scope["method"] == "HEAD"
        self._receive = receive
        self._send = send
        self.headers = Headers(scope=scope)
        self.record: RequestRecord = scope.setdefault("exportkit", RequestRecord())
        self.record.id = request_id(self.record.id or self.headers.get("x-request-id"))
        self._unread = "transfer-encoding" in self.headers or self.headers.get("content-length", "0") != "0"

    async def receive(self) -> Message:
        """Receives a part of the body, or that the client went away."""
        message = await self._receive()
        self._unread = message.get("more_body", False)
        self.record.received_bytes += len(message.get("body", b""))
        return message

    async def send(self, message: Message) -> None:
        """Sends a part of the answer. Every answer has the request's id."""
        if message["type"] == "http.response.start":
            self.record.status = message["status"]
            headers = [*message.get("headers", ()), (b"x-request-id", self.record.id.encode())]
            message = {**message, "headers": headers}
        elif not self._is_head:  # the server leaves the body of an answer to HEAD out
            self.record.sent_bytes += len(message.get("body", b""))
        try:
            await self._send(message)
        except OSError as error:  # uvicorn ignores what it cannot send; other servers say so
            raise CancelledError("the client went away before it had its answer") from error

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
        if isinstance(error, UnauthorizedError):
            lines.append((b"www-authenticate", b'Bearer realm="exportkit"'))
        if isinstance(error, UnknownEncodingError):
            lines.append((b"accept-encoding", b"gzip, deflate"))
        # A client that sent `Expect: 100-continue` has sent no body and will not; after `Upgrade` a body would be taken
        # for a request. The rest of any other body is thrown away.
        waits = not self.record.received_bytes and ("expect" in self.headers or "upgrade" in self.headers)
        if waits or isinstance(error, SlowClientError):
            lines.append((b"connection", b"close"))
        lingers = self._unread and not waits
        await self.send({"type": "http.response.start", "status": error.status, "headers": lines})
        await self.send({"type": "http.response.body", "body": body, "more_body": lingers})
        if lingers:
            with contextlib.suppress(TimeoutError):  # a connection that is closed at once takes the answer with it
                async with asyncio.timeout(_LINGER_SECONDS):
                    while self._unread:
                        await self.receive()
            await self.send({"type": "http.response.body"})
