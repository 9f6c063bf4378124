"""Sees every request when it is over, and tells the metrics, the access log and the traces."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from exportkit.serve.request_record import RequestRecord

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_log = logging.getLogger(__name__)

Observer = Callable[[RequestRecord], None]


class Observation:
    """Calls the observers for each request.

    Attributes:
        in_flight: The requests over HTTP that are not over.
    """

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = observers
        self.in_flight = 0

    def finished(self, record: RequestRecord) -> None:
        """Tells the observers of a request that is over. If one fails, the request does not."""
        record.seconds = time.perf_counter() - record.started
        for observe in self._observers:
            try:
                observe(record)
            except Exception:  # whatever an observer does, the request was answered
                _log.exception("request %s was not observed", record.id)


class ObservedApp:
    """The ASGI application around that of the protocol."""

    def __init__(self, app: ASGIApp, observation: Observation, draining: Callable[[], bool]) -> None:
        """While `draining`, every answer closes its connection, so that clients go to another server."""
        self._app = app
        self._observation = observation
        self._draining = draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request."""
        record: RequestRecord = scope.setdefault("exportkit", RequestRecord())
        record.method, record.path = scope["method"], scope["raw_path"].decode("latin-1")  # routing may change `path`
        record.remote = (scope.get("client") or ("",))[0]

        async def send_all(message: Message) -> None:
            if message["type"] == "http.response.start" and self._draining():
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            await send(message)

        self._observation.in_flight += 1
        try:
            await self._app(scope, receive, send_all)
        finally:
            self._observation.in_flight -= 1
            self._observation.finished(record)
