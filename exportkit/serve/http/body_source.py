"""Where a body comes from, and who waits for the answer: ASGI's messages, or more than ASGI offers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.types import Receive, Scope

Fill = Callable[[memoryview, Callable[[int], None]], Awaitable[bool]]
"""Fills memory with the body, which has exactly as many bytes, and calls the function for each part with its size.

Returns False if the client went away before. If the task is cancelled, `receive` returns what came since it began and
the rest.
"""

FILL = "exportkit.fill"
"""The name of a `Fill` in `scope["extensions"]`. Only a server that can has it."""

Watch = Callable[[Callable[[], None] | None], bool]
"""Calls the function once the client goes away; None ends that. Returns whether the client is there."""

WATCH = "exportkit.watch"
"""The name of a `Watch` in `scope["extensions"]`. Only a server that can has it."""


@dataclass(frozen=True)
class BodySource:
    """A request's body, and its client.

    Attributes:
        receive: ASGI's.
        fill: Copies the body once, where ASGI's messages are copied six times on their way; None if the server cannot.
        watch: Tells when the client goes away, without a task that waits for it; None if the server cannot.
    """

    receive: Receive
    fill: Fill | None = None
    watch: Watch | None = None

    @classmethod
    def of(cls, scope: Scope, receive: Receive) -> BodySource:
        """Returns the body of an ASGI request."""
        extensions = scope.get("extensions", {})
        return cls(receive, extensions.get(FILL), extensions.get(WATCH))
