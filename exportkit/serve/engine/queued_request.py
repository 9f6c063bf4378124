"""A request in the queue, and who gets its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from exportkit.serve.engine.checked_request import CheckedRequest
from exportkit.serve.engine.execution import BatchResult
from exportkit.serve.statuses import ServeError

Answered = Callable[[BatchResult | ServeError], None]
"""Gets the answer to a request, or why there is none, in the event loop's thread."""


class QueuedRequest:
    """A request and who gets its answer, which belongs to the event loop.

    Attributes:
        request: The request.
        answered: Gets the answer.
        over: Whether it had its answer, or nobody wants it any more.
        expiry: Ends it when its timeout passes.
    """

    __slots__ = ("answered", "expiry", "over", "request")

    def __init__(self, request: CheckedRequest, answered: Answered) -> None:
        self.request = request
        self.answered = answered
        self.over = False
        self.expiry: asyncio.TimerHandle | None = None

    def answer(self, outcome: BatchResult | ServeError) -> None:
        """Tells the answer, unless it is over."""
        if not self.over:
            self.over = True
            if self.expiry is not None:
                self.expiry.cancel()
            self.answered(outcome)
