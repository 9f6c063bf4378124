"""What is known about a request: HTTP and gRPC fill it, logs, metrics and traces read it."""

from __future__ import annotations

import random
import re
import time
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Literal

from exportkit.serve.protocol.inference import InferTiming
from exportkit.serve.statuses import ServeError

_USABLE_ID = re.compile(r"[!-~]{1,128}")


def request_id(given: str | None) -> str:
    """Returns the id that a client gave in `x-request-id`, or a new one if it is missing or not safe in a log."""
    if given is not None and _USABLE_ID.fullmatch(given):
        return given
    # Not of the system's random numbers: to ask it gives Python's lock away, and a runner keeps it for a while. Nobody
    # is trusted for knowing an id.
    return f"{random.getrandbits(128):032x}"


def key_of(authorization: bytes) -> bytes:
    """Returns the API key in the value of a header `Authorization`; empty: it has none."""
    scheme, _, value = authorization.partition(b" ")
    return value.strip() if scheme.lower() == b"bearer" else b""


def identity_of(authorization: bytes) -> str:
    """Returns a name for who has the key in a header `Authorization`, without telling it."""
    return sha256(b"exportkit client " + key_of(authorization)).hexdigest()[:32]


@dataclass(frozen=True)
class Failure:
    """What is told of a ServeError. The error itself keeps the request's body, in the frames that it came through.

    Attributes:
        code: The name of the gRPC status.
        reason: The label in the metrics.
        text: What the client was told.
    """

    code: str
    reason: str
    text: str


@dataclass
class RequestRecord:
    """One request, filled as it becomes known.

    Over HTTP it is `scope["exportkit"]`. The application puts it there, unless a middleware around it did before. It is
    complete when the application returns, also for requests that were refused or whose client went away.

    Attributes:
        protocol: The way in.
        id: The `x-request-id` of the answer.
        started: When the request's headers were read, by `time.perf_counter()`, in seconds.
        seconds: From then to the end of the answer.
        method: The HTTP method, or the full name of the RPC.
        path: The URL's path without its query, as the client wrote it. Empty for gRPC.
        remote: The client's address, without its port. Empty: not known.
        asked: The model's name, as the client wrote it. Empty: no model is asked for.
        model: The served model that is asked for an inference. Empty: none, or no such model is served.
        version: Its version. Empty: no version was chosen.
        status: The HTTP status, or 0 before the answer has begun. 499: the client went away.
        error: Why the request was refused or failed. None: it was not.
        received_bytes: The bytes of the body that were read, as they were sent.
        sent_bytes: The bytes of the answer's body, as they are sent.
        timing: Where an inference's time went.
        client: Who asks: `identity_of` the API key. Empty: no key is asked for.
        sequence: The id of the sequence that an inference is a step of.
    """

    protocol: Literal["http", "grpc"] = "http"
    id: str = ""
    started: float = field(default_factory=time.perf_counter)
    seconds: float = 0.0
    method: str = ""
    path: str = ""
    remote: str = ""
    asked: str = ""
    model: str = ""
    version: str = ""
    status: int = 0
    error: Failure | None = None
    received_bytes: int = 0
    sent_bytes: int = 0
    timing: InferTiming | None = None
    client: str = ""
    sequence: int | str | None = None

    def failed(self, error: ServeError) -> None:
        """Records why there is no answer."""
        self.error = Failure(error.code, error.reason, error.text)
        self.status = error.status
