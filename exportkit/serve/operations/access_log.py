"""The access log: a line of JSON for each request."""

from __future__ import annotations

import json
import time
from functools import lru_cache
from typing import Any

from exportkit.serve.operations.line_writer import LineWriter
from exportkit.serve.request_record import RequestRecord

_PAGE_NUMBERS = "/page/status"
_SHOWN = 500  # characters of what a client wrote


class AccessLog:
    """Writes what is known about a request. Everything but ASCII is escaped, so that a line is a request.

    An open page asks for its numbers every second. These answers are left out.
    """

    def __init__(self, writer: LineWriter) -> None:
        self._writer = writer

    def __call__(self, record: RequestRecord) -> None:
        """Writes a line."""
        if record.path == _PAGE_NUMBERS and record.status == 200:
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
        "model": record.model,
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
