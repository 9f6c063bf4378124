"""Where a body comes from: ASGI's messages, or straight from the connection, which is more than ASGI offers."""

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


@dataclass(frozen=True)
class BodySource:
    """A request's body.

    Attributes:
        receive: ASGI's.
        fill: Copies the body once, where ASGI's messages are copied six times on their way; None if the server cannot.
    """

    receive: Receive
    fill: Fill | None = None

    @classmethod
    def of(cls, scope: Scope, receive: Receive) -> BodySource:
        """Returns the body of an ASGI request."""
        return cls(receive, scope.get("extensions", {}).get(FILL))
