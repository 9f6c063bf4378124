"""Requests without state whose answers go to a function: they need no task, and nobody waits for them."""

from __future__ import annotations

import asyncio
import time

from exportkit.serve.batching.tickets import BatchLimits, Ticket
from exportkit.serve.engine.accepted import AcceptedRequests
from exportkit.serve.engine.checked_request import RequestPlan
from exportkit.serve.engine.dispatcher import Dispatcher
from exportkit.serve.engine.execution import BatchResult
from exportkit.serve.engine.model_description import DEFAULT_PRIORITY
from exportkit.serve.engine.queued_request import Answered, QueuedRequest
from exportkit.serve.engine.statistics import Statistics
from exportkit.serve.protocol.inference import InferRequest
from exportkit.serve.statuses import CancelledError, ServeError


class Asks:
    """Takes such requests for one model."""

    def __init__(
        self,
        plan: RequestPlan,
        dispatcher: Dispatcher,
        accepted: AcceptedRequests,
        counted: Statistics,
        limits: BatchLimits,
    ) -> None:
        self.plan = plan
        self.dispatcher = dispatcher
        self.accepted = accepted
        self.counted = counted
        self._limits = limits

    def has_room(self, size: int) -> bool:
        """Whether a body of so many bytes may come, of a client that shares the room with nobody."""
        return self.accepted.why_no_room(size, "", self._limits, self.counted.queued_rows, 0) is None


class AskedRequest:
    """A request that is answered to a function, and counts as one that `ServedModel.infer` answers."""

    def __init__(self, asks: Asks, request: InferRequest, size: int, answered: Answered) -> None:
        """Puts the request into the queue. `answered` gets the answer or the error, once and later.

        Raises:
            ServeError: Nothing was counted: `ServedModel.infer` says the same and counts it.
        """
        self._asks = asks
        self._size = size
        self._answered = answered
        self._over = False
        self._accepted = time.perf_counter()
        checked = asks.plan.check(request)
        self._ticket: Ticket[QueuedRequest] | None = None
        if (ran := asks.dispatcher.run_quick(checked)) is not None:
            asyncio.get_running_loop().call_soon(self._ran, ran)
        else:
            self._ticket = asks.dispatcher.submit(
                checked,
                self._ran,
                priority=request.priority or DEFAULT_PRIORITY,
                timeout=request.timeout,
                client=request.client,
            )
        asks.accepted.enter(size)

    def give_up(self) -> None:
        """Nobody wants the answer any more. `answered` is not called."""
        self._over = True
        if self._ticket is not None:
            self._asks.dispatcher.give_up(self._ticket)
        self._leave()
        self._asks.counted.failed(CancelledError.reason, time.perf_counter() - self._accepted)

    def _ran(self, outcome: BatchResult | ServeError) -> None:
        if self._over:
            return
        self._leave()
        seconds = time.perf_counter() - self._accepted
        if isinstance(outcome, ServeError):
            self._asks.counted.failed(outcome.reason, seconds)
        else:
            self._asks.counted.succeeded(outcome.timing, seconds)
        self._answered(outcome)

    def _leave(self) -> None:
        self._ticket = None  # which refers to this, and would keep the inputs
        self._asks.accepted.leave(self._size)
