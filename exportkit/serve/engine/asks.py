"""Requests without state whose answers go to a function: they need no task, and nobody waits for them."""

from __future__ import annotations

import asyncio
import time
from typing import NamedTuple

from exportkit.serve.batching.tickets import BatchLimits, Ticket
from exportkit.serve.engine.accepted import AcceptedRequests
from exportkit.serve.engine.checked_request import CheckedRequest, KnownInputs, RequestPlan
from exportkit.serve.engine.dispatcher import Dispatcher
from exportkit.serve.engine.execution import BatchResult
from exportkit.serve.engine.model_description import DEFAULT_PRIORITY
from exportkit.serve.engine.queued_request import Answered, QueuedRequest
from exportkit.serve.engine.statistics import Statistics
from exportkit.serve.protocol.inference import InferRequest
from exportkit.serve.protocol.parameters import OutputForms
from exportkit.serve.statuses import CancelledError, ServeError

_REMEMBERED, _REMEMBERED_BYTES = 256, 4096  # requests, and bytes of the text of each at most


class KnownRequest(NamedTuple):
    """What is true of all requests with the same text before the bytes of their inputs.

    Attributes:
        request: One of them, without its inputs.
        forms: How the answer is to be written.
        model: The name of the model that answers.
        inputs: Where the inputs are.
    """

    request: InferRequest
    forms: OutputForms
    model: str
    inputs: KnownInputs


class Asks:
    """Takes such requests for one model.

    Attributes:
        known: Checked requests by the text before their inputs. Clients send the same again, with other elements.
    """

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
        self.known: dict[bytes, KnownRequest] = {}
        self._limits = limits

    def remember(self, text: bytes, known: KnownRequest) -> None:
        """Remembers a request, if its text is short."""
        if len(text) <= _REMEMBERED_BYTES:
            if len(self.known) >= _REMEMBERED:
                self.known.clear()
            self.known[text] = known

    def has_room(self, size: int) -> bool:
        """Whether a body of so many bytes may come."""
        return self.accepted.why_no_room(size, self._limits, self.counted.queued_rows) is None


class AskedRequest:
    """A request that is answered to a function, and counts as one that `ServedModel.infer` answers."""

    def __init__(
        self, asks: Asks, request: InferRequest, checked: CheckedRequest, size: int, answered: Answered
    ) -> None:
        """Puts a request into the queue, which `asks.plan` checked; its own inputs are not read.

        `answered` gets the answer or the error, once and later.

        Raises:
            ServeError: Nothing was counted: `ServedModel.infer` says the same and counts it.
        """
        self._asks = asks
        self._size = size
        self._answered = answered
        self._over = False
        self._accepted = time.perf_counter()
        self._ticket: Ticket[QueuedRequest] | None = None
        if (ran := asks.dispatcher.run_quick(checked)) is not None:
            asyncio.get_running_loop().call_soon(self._ran, ran)
        else:
            self._ticket = asks.dispatcher.submit(
                checked,
                self._ran,
                priority=request.priority or DEFAULT_PRIORITY,
                timeout=request.timeout,
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
