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

    def wrap(self, app: ASGIApp, draining: Callable[[], bool]) -> ASGIApp:
        """Returns an application around `app` that is observed.

        While `draining`, every answer closes its connection, so that clients go to another server.
        """

        async def observed(scope: Scope, receive: Receive, send: Send) -> None:
            record: RequestRecord = scope.setdefault("exportkit", RequestRecord())
            record.method, record.path = scope["method"], scope["raw_path"].decode("latin-1")
            record.remote = (scope.get("client") or ("",))[0]

            async def send_all(message: Message) -> None:
                if message["type"] == "http.response.start" and draining():
                    message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
                await send(message)

            self.in_flight += 1
            try:
                await app(scope, receive, send_all)
            finally:
                self.in_flight -= 1
                self.finished(record)

        return observed
