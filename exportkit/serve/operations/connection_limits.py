"""What a connection of HTTP may do, and how one is refused that does more."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus

from exportkit.serve.statuses import ServeError


@dataclass(frozen=True)
class ConnectionLimits:
    """What a connection may do.

    Attributes:
        connections: The most connections that are open at the same time.
        header_bytes: The most bytes of a request's line and headers.
        header_seconds: Within these they must have arrived, counted from their first byte. So must a TLS handshake.
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


def refusal(error: ServeError) -> bytes:
    """Returns an answer in JSON, after which the connection is closed."""
    body = json.dumps({"error": error.text}).encode()
    head = [
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        *([] if error.retry_after is None else [f"retry-after: {error.retry_after}"]),
        "connection: close",
    ]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body
