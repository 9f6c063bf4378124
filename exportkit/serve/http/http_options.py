"""The options of the HTTP application."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from exportkit.serve.protocol.shared_memory import SharedMemory
from exportkit.serve.protocol.tensors import aligned_bytes


@dataclass(frozen=True)
class HttpOptions:
    """How the application treats its clients.

    Attributes:
        shared_memory: The regions that clients registered, over HTTP or gRPC. None: it is not offered.
        idle_seconds: A body may pause for so long.
        least_rate: Bytes a second that a body must have on average after the first `idle_seconds`.
        linger_seconds: How long a client may go on sending after it was refused, before the connection is closed.
        allocate: Makes the memory of bodies, as `aligned_bytes` does.
    """

    shared_memory: SharedMemory | None = None
    idle_seconds: float = 20.0
    least_rate: float = 16384.0
    linger_seconds: float = 2.0
    allocate: Callable[[int, int], memoryview] = aligned_bytes
