"""Sees every request when it is over, and tells the metrics, the access log and the traces."""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from exportkit.serve.request_record import RequestRecord

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send


_MAX_WAITING = 10_000
_GATHER_SECONDS = 0.02  # A thread that woke up for each line would take the interpreter's lock from the models'.


class LineWriter:
    """A thread that writes lines to a file descriptor.

    A reader that is too slow, such as a full pipe, loses lines: requests do not wait for a log.
    """

    def __init__(self, descriptor: int, lost: Callable[[int], None]) -> None:
        """Starts the thread. `lost` gets the number of lines that were given up; any thread may call it."""
        self._descriptor = descriptor
        self._lost = lost
        self._waiting: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="exportkit-log", daemon=True)
        self._thread.start()

    def write(self, line: bytes) -> None:
        """Writes a line soon. It has no line break."""
        if self._waiting.qsize() < _MAX_WAITING:
            self._waiting.put(line + b"\n")
        else:
            self._lost(1)

    def close(self, seconds: float) -> None:
        """Writes what waits, within this time."""
        self._closing.set()
        self._waiting.put(None)
        self._thread.join(seconds)

    def _run(self) -> None:
        ended = False
        while not ended:
            waiting = [self._waiting.get()]
            self._closing.wait(_GATHER_SECONDS)  # so that many lines need one system call
            while not self._waiting.empty():
                waiting.append(self._waiting.get())
            ended = None in waiting
            lines = [line for line in waiting if line is not None]
            rest = memoryview(b"".join(lines))
            try:
                while rest:
                    rest = rest[os.write(self._descriptor, rest) :]
            except OSError:  # nobody reads any more, or the disk is full
                self._lost(len(lines))


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
                record.asked = scope.get("path_params", {}).get("model", "")
                self.finished(record)

        return observed


_PAGE_NUMBERS = "/page/status"
_PROBES = ("/health/live", "/ready", "/ServerLive", "/ServerReady", "/ModelReady", "/grpc.health.v1.Health/Check")
_SHOWN = 500  # characters of what a client wrote


class AccessLog:
    """Writes what is known about a request. Everything but ASCII is escaped, so that a line is a request.

    An open page asks for its numbers every second, and a probe whether it may send requests. These answers are left
    out; the server's log says what becomes ready.
    """

    def __init__(self, writer: LineWriter) -> None:
        self._writer = writer

    def __call__(self, record: RequestRecord) -> None:
        """Writes a line."""
        asked = record.path.rstrip("/") or record.method
        if asked == _PAGE_NUMBERS and record.status == 200:
            return
        if asked.endswith(_PROBES) and record.status in (200, 503):
            return
        self._writer.write(json.dumps(entry(record)).encode())


def entry(record: RequestRecord) -> dict[str, Any]:
    """Returns the line's content. Times are in milliseconds, sizes in bytes of the bodies."""
    now, error, timing = time.time(), record.error, record.timing
    found: dict[str, Any] = {
        "time": f"{_second(int(now))}.{int(now % 1 * 1e3):03}+00:00",
        "id": record.id,
        "remote": record.remote,
        "protocol": record.protocol,
        "method": record.method[:_SHOWN],
        "path": record.path[:_SHOWN],
        "model": record.model or record.asked[:_SHOWN],
        "version": record.version,
        "status": record.status,
        "received": record.received_bytes,
        "sent": record.sent_bytes,
        "ms": round(record.seconds * 1e3, 3),
    }
    if record.sequence is not None:
        found["sequence"] = record.sequence
    if error is not None:
        found |= {"reason": error.reason, "error": error.text[:_SHOWN]}
    if timing is not None:
        compute = timing.compute_input + timing.compute_infer + timing.compute_output
        found |= {
            "queue_ms": round(timing.queue * 1e3, 3),
            "compute_ms": round(compute * 1e3, 3),
            "batch_rows": timing.batch_rows,
        }
    return found


@lru_cache(maxsize=4)
def _second(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
