"""The access log, a line of JSON for each request, and the other observers that options ask for."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import msgspec

from exportkit.serve.operations.line_writer import LineWriter
from exportkit.serve.operations.observation import Finished, Observer
from exportkit.serve.serve_options import ServeOptions

_PAGE_NUMBERS = "/page/status"
_CLOSE_SECONDS = 2.0
_SHOWN = 500  # characters of what a client wrote

_encode = msgspec.json.Encoder().encode


class AccessLog:
    """Writes what is known about a request. Everything but ASCII is escaped, so that a line is a request.

    An open page asks for its numbers every second. These answers are left out.
    """

    def __init__(self, writer: LineWriter) -> None:
        self._writer = writer

    def __call__(self, finished: Finished) -> None:
        """Writes a line."""
        if finished.path == _PAGE_NUMBERS and finished.record.status == 200:
            return
        self._writer.write(line_of(entry(finished)))


def line_of(found: dict[str, Any]) -> bytes:
    """Returns a line's JSON as `json.dumps` writes it, which takes five times as long: every request waits for it."""
    try:
        line = msgspec.json.format(_encode(found), indent=0)
    except UnicodeEncodeError:  # half of a surrogate pair
        line = b"\x7f"
    return line if line.isascii() and b"\x7f" not in line else json.dumps(found).encode()


def entry(finished: Finished) -> dict[str, Any]:
    """Returns the line's content. Times are in milliseconds, sizes in bytes of the bodies."""
    record, error, timing = finished.record, finished.record.error, finished.record.timing
    found: dict[str, Any] = {
        "time": f"{_second(int(finished.ended))}.{int(finished.ended % 1 * 1e3):03}+00:00",
        "id": record.id,
        "remote": finished.remote,
        "protocol": record.protocol,
        "method": finished.method[:_SHOWN],
        "path": finished.path[:_SHOWN],
        "model": record.model,
        "version": record.version,
        "status": record.status,
        "received": record.received_bytes,
        "sent": record.sent_bytes,
        "ms": round(finished.seconds * 1e3, 3),
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


def observers_of(
    options: ServeOptions, lines_lost: Callable[[int], None]
) -> tuple[list[Observer], list[Callable[[], None]]]:
    """Returns the observers, and functions that write or send at the end what they still hold.

    Args:
        options: The server's.
        lines_lost: Gets the number of lines of the log that could not be written. Any thread may call it.
    """
    observers: list[Observer] = []
    closing: list[Callable[[], None]] = []
    if options.access_log:
        writer = LineWriter(sys.stderr.fileno(), lines_lost)
        closing.append(lambda: writer.close(_CLOSE_SECONDS))
        observers.append(AccessLog(writer))
    if options.traces is not None:
        from exportkit.serve.operations.tracing import traces_to  # its packages are an extra

        traces = traces_to(options.traces)
        closing.append(traces.close)
        observers.append(traces)
    return observers, closing
