"""Sees every request when it is over, and tells the metrics, the access log and the traces."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from exportkit.serve.http.exchange import headers_of
from exportkit.serve.request_record import RequestRecord
from exportkit.serve.statuses import ServeError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_log = logging.getLogger(__name__)

CHALLENGE = (b"www-authenticate", b'Bearer realm="exportkit"')
_CLOSE = (b"connection", b"close")


@dataclass(frozen=True)
class Finished:
    """A request that is over.

    Attributes:
        record: What it was and what became of it.
        method: The HTTP method, or the full name of the RPC.
        path: The URL's path without its query, as the client wrote it. Empty for gRPC.
        remote: The client's address, without its port. Empty: not known.
        metadata: HTTP headers or gRPC metadata by lower-case name.
        scheme: `http` or `https`. Empty for gRPC.
        seconds: From the request's headers to the end of the answer.
        ended: When it was over, in seconds since 1970.
    """

    record: RequestRecord
    method: str
    path: str
    remote: str
    metadata: Mapping[str, str]
    seconds: float
    scheme: str = ""
    ended: float = field(default_factory=time.time)


Observer = Callable[[Finished], None]


class Observation:
    """Calls the observers for each request.

    Attributes:
        in_flight: The requests over HTTP that are not over.
    """

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = observers
        self.in_flight = 0

    def finished(self, finished: Finished) -> None:
        """Tells the observers. If one fails, the request does not."""
        for observe in self._observers:
            try:
                observe(finished)
            except Exception:  # whatever an observer does, the request was answered
                _log.exception("request %s was not observed", finished.record.id)

    def over(self, record: RequestRecord, scope: Scope) -> None:
        """Tells of a request over HTTP."""
        seconds = time.perf_counter() - record.started
        method, remote, scheme = scope["method"], (scope.get("client") or ("",))[0], scope["scheme"]
        path = scope["raw_path"].decode("latin-1")  # routing may change `path`
        self.finished(Finished(record, method, path, remote, headers_of(scope), seconds, scheme))

    def refused(self, remote: str, error: ServeError) -> None:
        """Tells of a refusal that happened before there was a request: of a connection, or of what is not HTTP."""
        record = RequestRecord()
        record.failed(error)
        self.finished(Finished(record, method="", path="", remote=remote, metadata={}, seconds=0.0))


class ObservedApp:
    """The outermost ASGI application."""

    def __init__(self, app: ASGIApp, observation: Observation, draining: Callable[[], bool]) -> None:
        """While `draining`, every answer closes its connection, so that clients go to another server."""
        self._app = app
        self._observation = observation
        self._draining = draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = scope.setdefault("exportkit", RequestRecord())

        async def send_all(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *self._headers(message["status"])]}
            await send(message)

        self._observation.in_flight += 1
        try:
            await self._app(scope, receive, send_all)
        finally:
            self._observation.in_flight -= 1
            self._observation.over(record, scope)

    def _headers(self, status: int) -> Sequence[tuple[bytes, bytes]]:
        return [*([CHALLENGE] if status == 401 else []), *([_CLOSE] if self._draining() else [])]
