"""The queue of a model and the threads that empty it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from exportkit.serve.batching.batcher import Batch, Batcher, BatcherFullError, Ticket
from exportkit.serve.engine.checked_request import CheckedRequest
from exportkit.serve.engine.execution import BatchResult, RequestRunner
from exportkit.serve.engine.model_copy import ModelCopy
from exportkit.serve.engine.queued_request import Answered, QueuedRequest
from exportkit.serve.engine.statistics import Statistics
from exportkit.serve.statuses import (
    BackendError,
    BadRequestError,
    DeadlineError,
    NotReadyError,
    QueueFullError,
    ServeError,
)

_SHORTEST_TIMER = 0.001  # seconds
_LIFE_SIGN_SECONDS = 1.0  # how often an idle runner looks whether its worker process lives

_log = logging.getLogger(__name__)

_Ticket = Ticket[QueuedRequest]
_Outcome = tuple[_Ticket, "BatchResult | ServeError"]


class Dispatcher:
    """Requests wait here, and runner threads take batches of them. All methods are for the event loop's thread."""

    def __init__(self, batcher: Batcher[QueuedRequest], counted: Statistics) -> None:
        """`start` starts the runners."""
        self._batcher = batcher
        self._counted = counted
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()  # guards the batcher and what follows
        self._changed = threading.Condition(self._lock)  # for threads that could run a batch
        self._lost = threading.Condition(self._lock)  # for threads whose copy never answers again
        self._waiting: set[_Ticket] = set()
        self._stopping = False
        self._threads: list[threading.Thread] = []
        self._copies: list[ModelCopy] = []
        self._timer: asyncio.TimerHandle | None = None
        self._wakes = math.inf  # when it does
        self._preparing: list[asyncio.Future[None]] = []

    def start(self, copy: ModelCopy, make_runner: Callable[[], RequestRunner], runners: int) -> None:
        """Starts the runners of a copy.

        Args:
            copy: The copy.
            make_runner: Makes a runner, in its thread.
            runners: How many batches the copy runs at the same time.
        """
        self._copies.append(copy)
        for _ in range(runners):
            prepared = self._loop.create_future()
            self._preparing.append(prepared)
            thread = threading.Thread(
                target=self._serve, args=(copy, make_runner, prepared), name="exportkit runner", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    async def prepared(self) -> None:
        """Waits until every runner could take a batch. Raises what one of them raised."""
        await asyncio.gather(*self._preparing)

    async def run(self, request: CheckedRequest, *, priority: int, timeout: float | None) -> BatchResult:
        """Runs a request when a runner takes it. Cancelling the task takes it out of the queue.

        Raises:
            ServeError: The class says why.
        """
        answer: asyncio.Future[BatchResult] = self._loop.create_future()

        def answered(outcome: BatchResult | ServeError) -> None:
            if answer.done():  # the task was cancelled
                return
            if isinstance(outcome, ServeError):
                answer.set_exception(outcome)
            else:
                answer.set_result(outcome)

        ticket = self.submit(request, answered, priority=priority, timeout=timeout)
        try:
            return await answer
        finally:
            self.give_up(ticket)

    def submit(self, request: CheckedRequest, answered: Answered, *, priority: int, timeout: float | None) -> _Ticket:
        """Runs a request when a runner takes it. `answered` is called once, and never before this returns.

        Raises:
            QueueFullError: As much waits as may.
            BadRequestError: No batch has room for it.
        """
        now = time.monotonic()
        payload = QueuedRequest(request, answered)
        deadline = None if timeout is None else now + timeout
        ticket: _Ticket = Ticket(payload, request.bucket, request.rows, request.size, priority, deadline, now)
        with self._lock:
            try:
                self._batcher.submit(ticket)
            except BatcherFullError as error:
                raise QueueFullError(str(error), hint="Try again later.") from error
            except ValueError as error:
                raise BadRequestError(str(error), hint="Send its rows in several requests.") from error
            self._waiting.add(ticket)
            self._counted.entered(ticket.rows, ticket.size)
            if self._batcher.may_take:
                self._changed.notify()
        if timeout is not None:
            # The batcher expects lateness; this timer is for a request that already runs, too.
            payload.expiry = self._loop.call_later(timeout, self._expire, ticket)
        if timeout is not None or self._wakes > now + self._batcher.delay:  # else it wakes in time for this one, too
            self._set_timer()
        return ticket

    def give_up(self, ticket: _Ticket) -> None:
        """Takes a request out of the queue, whose answer nobody wants any more."""
        payload = ticket.payload
        if payload.expiry is not None:
            payload.expiry.cancel()
        payload.over = True
        if ticket in self._waiting:
            self._withdraw([ticket])

    def fail_waiting(self, error: Callable[[], ServeError]) -> None:
        """Answers everything that waits with an error."""
        with self._lock:
            waiting = list(self._waiting)
        self._withdraw(waiting)
        self._deliver([(ticket, error()) for ticket in waiting])

    def stop(self) -> list[threading.Thread]:
        """Lets the runners end after their batch. Returns the threads; join them in another thread."""
        if self._timer is not None:
            self._timer.cancel()
        with self._lock:
            self._stopping = True
            self._changed.notify_all()
            self._lost.notify_all()
        return self._threads

    def _withdraw(self, tickets: Iterable[_Ticket]) -> None:
        """Takes requests out of the queue. Those that run or ran are not in it."""
        with self._lock:
            for ticket in tickets:
                if ticket in self._waiting:
                    self._batcher.cancel(ticket)
                    self._left(ticket)

    def _left(self, ticket: _Ticket) -> None:
        self._waiting.remove(ticket)
        self._counted.left(ticket.rows, ticket.size)

    def _expire(self, ticket: _Ticket) -> None:
        self._withdraw([ticket])
        ticket.payload.answer(DeadlineError("the request's timeout passed before the answer was there"))

    def _set_timer(self) -> None:
        """Wakes the loop when the batcher may drop a request, or a runner may take one, without anything new."""
        if self._timer is None and not self._batcher.timed:
            return
        now = time.monotonic()
        with self._lock:
            when = None if self._stopping else self._batcher.next_event(now)
        if self._timer is not None:
            self._timer.cancel()
        delay = None if when is None else max(when - now, _SHORTEST_TIMER)
        self._timer = None if delay is None else self._loop.call_later(delay, self._on_timer)
        self._wakes = math.inf if delay is None else now + delay

    def _on_timer(self) -> None:
        self._timer, self._wakes = None, math.inf
        with self._lock:
            late = self._drop_late(time.monotonic())
            self._changed.notify_all()  # several batches may have waited long enough
        self._deliver(late)

    def _drop_late(self, now: float) -> list[_Outcome]:
        late = self._batcher.late(now)
        for ticket in late:
            self._left(ticket)
        return [
            (ticket, DeadlineError("the request's timeout would pass before the model could answer")) for ticket in late
        ]

    def _deliver(self, outcomes: Sequence[_Outcome]) -> None:
        for ticket, outcome in outcomes:
            ticket.payload.answer(outcome)
        self._set_timer()

    # --- in the runners' threads --------------------------------------------------------------------------------------

    def _call_in_loop(self, function: Callable[..., object], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed, so nobody waits
            self._loop.call_soon_threadsafe(function, *args)

    def _serve(self, copy: ModelCopy, make_runner: Callable[[], RequestRunner], prepared: asyncio.Future[None]) -> None:
        try:
            runner = make_runner()
        except Exception as error:
            self._call_in_loop(prepared.set_exception, error)
            return
        self._call_in_loop(prepared.set_result, None)
        while (batch := self._next(copy)) is not None:
            began = time.monotonic()
            requests = [ticket.payload.request for ticket in batch.tickets]
            answers = _answers(runner, requests, [batch.taken - ticket.arrived for ticket in batch.tickets])
            seconds = time.monotonic() - began - runner.waited
            with self._lock:
                self._counted.busy(-1)
                self._batcher.finished(batch, seconds)
            self._call_in_loop(self._deliver, list(zip(batch.tickets, answers)))
            del batch, requests, answers  # the tensors of the last batch are not needed while this thread waits

    def _next(self, copy: ModelCopy) -> Batch[QueuedRequest] | None:
        """Waits for a batch that this copy can run. Returns None when the runner should end."""
        while True:
            if not copy.alive:
                self._restore(copy)
            with self._lock:
                if self._stopping:
                    return None
                if not copy.alive:  # what waits is for the copies that live
                    if copy.lost is not None:
                        self._lost.wait(_LIFE_SIGN_SECONDS)
                    continue
                if (batch := self._take(time.monotonic())) is not None:
                    self._counted.busy(1)
                    return batch
                self._changed.wait(_LIFE_SIGN_SECONDS)

    def _take(self, now: float) -> Batch[QueuedRequest] | None:
        """Takes a batch out of the queue, and those that are late."""
        batch = self._batcher.take(now)
        if batch is not None:
            self._waiting.difference_update(batch.tickets)
            self._counted.left(batch.rows, sum(ticket.size for ticket in batch.tickets), len(batch.tickets))
        if late := self._drop_late(now):
            self._call_in_loop(self._deliver, late)
        return batch

    def _restore(self, copy: ModelCopy) -> None:
        """Loads a copy again. Nothing may wait for a model that cannot be loaded."""
        if copy.restore() or any(each.alive for each in self._copies):
            return
        reason = copy.failure or "the model was closed"
        self._call_in_loop(self.fail_waiting, lambda: NotReadyError(reason))


def _answers(
    runner: RequestRunner, requests: Sequence[CheckedRequest], waited: Sequence[float]
) -> Sequence[BatchResult | ServeError]:
    try:
        return runner.run(requests, waited)
    except Exception as error:  # a fault of the server's own
        _log.error("a runner failed", exc_info=error)
        return [BackendError(f"the runner failed: {error}") for _ in requests]
