"""Steps on their way into the queue, and what is counted of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from exportkit.serve.engine.accepted import AcceptedRequests, WaitingStep
from exportkit.serve.engine.dispatcher import Dispatcher
from exportkit.serve.engine.execution import BatchResult
from exportkit.serve.engine.queued_request import Answered
from exportkit.serve.engine.served_sequences import PendingStep
from exportkit.serve.engine.statistics import Statistics
from exportkit.serve.engine.steps import StepRequest
from exportkit.serve.statuses import CancelledError, ServeError


class CountedStep:
    """A step that is accepted and counted without a task of its own: it passes the answer on.

    Attributes:
        step: The step in its sequence.
        waiting: Counts it while it waits for the steps before it.
    """

    __slots__ = ("_accepted", "_answered", "_began", "_counted", "_size", "step", "waiting")

    def __init__(self, accepted: AcceptedRequests, counted: Statistics, size: int, answered: Answered) -> None:
        """Is accepted from now on."""
        self._accepted = accepted
        self._counted = counted
        self._size = size
        self._answered = answered
        self._began = time.perf_counter()
        self.step: PendingStep | None = None
        self.waiting: WaitingStep | None = None
        accepted.enter(size)

    def __call__(self, outcome: BatchResult | ServeError) -> None:
        """Gets the answer."""
        self._leave()
        seconds = time.perf_counter() - self._began
        if isinstance(outcome, ServeError):
            self._counted.failed(outcome.reason, seconds)
        else:
            self._counted.succeeded(outcome.timing, seconds)
        self._answered(outcome)

    def refused(self, error: ServeError) -> None:
        """It did not begin."""
        self._leave()
        self._counted.failed(error.reason, time.perf_counter() - self._began)

    def give_up(self) -> None:
        """Ends the sequence, unless the step was answered: nobody waits for it any more."""
        if self.step is not None and not self.step.over:
            self._leave()
            self._counted.failed(CancelledError.reason, time.perf_counter() - self._began)
            self.step.give_up()

    def _leave(self) -> None:
        self._accepted.leave(self._size)
        if self.waiting is not None:
            self.waiting.close()


class QueuedSteps:
    """Puts steps into the queue of the copy that has their state."""

    def __init__(self, dispatchers: Sequence[Dispatcher], priority: int, waiting: WaitingStep | None = None) -> None:
        """`waiting` counts a step as waiting until it is in the queue that counts it, too."""
        self._dispatchers = dispatchers
        self._priority = priority
        self._waiting = waiting

    def __call__(self, step: StepRequest, copy: int, timeout: float | None, answered: Answered) -> Callable[[], None]:
        """Runs a step. Returns how to take it out of the queue."""
        if self._waiting is not None:
            self._waiting.close()
        dispatcher = self._dispatchers[copy]
        ticket = dispatcher.submit(step, answered, priority=self._priority, timeout=timeout)
        return partial(dispatcher.give_up, ticket)
