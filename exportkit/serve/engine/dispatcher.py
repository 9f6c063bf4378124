"""The queue of a model and the threads that empty it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence

from exportkit.serve.batching.batcher import Batcher, BatcherFullError
from exportkit.serve.batching.pending import Batch
from exportkit.serve.engine.checked_request import CheckedRequest, Outcome
from exportkit.serve.engine.model_replica import ModelReplica
from exportkit.serve.engine.runners import BatchRunner
from exportkit.serve.engine.statistics import Statistics
from exportkit.serve.protocol.inference import InferAnswer
from exportkit.serve.statuses import (
    BackendError,
    BadRequestError,
    DeadlineError,
    NotReadyError,
    QueueFullError,
    ServeError,
)

_LIFE_SIGN_SECONDS = 1.0  # how often an idle runner looks whether its worker process lives
_TOO_LATE = "the request's timeout passed before the answer was there"
_WOULD_BE_LATE = "the request's timeout would pass before the model could answer"

_log = logging.getLogger(__name__)


class Dispatcher:
    """Requests wait here, and runner threads take batches of them.

    The event loop's thread puts requests in and gets their outcomes; a lock guards what both sides use.
    """

    def __init__(self, batcher: Batcher[CheckedRequest], counted: Statistics) -> None:
        """`start` starts the runners."""
        self._batcher = batcher
        self._counted = counted
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()  # guards the batcher and what follows
        self._changed = threading.Condition(self._lock)  # for threads that could run a batch
        self._stopping = False
        self._wakes = math.inf  # when an idle runner looks into the queue by itself
        self._threads: list[threading.Thread] = []
        self._replicas: list[ModelReplica] = []

    async def start(self, replica: ModelReplica, make_runner: Callable[[], BatchRunner], runners: int) -> None:
        """Starts the runners of a replica, and waits until each could take a batch. Raises what one of them raised.

        Args:
            replica: The replica.
            make_runner: Makes a runner, in its thread.
            runners: How many batches the replica runs at the same time.
        """
        self._replicas.append(replica)
        started = [self._loop.create_future() for _ in range(runners)]
        for each in started:
            thread = threading.Thread(
                target=self._serve, args=(replica, make_runner, each), name="exportkit runner", daemon=True
            )
            self._threads.append(thread)
            thread.start()
        await asyncio.gather(*started)

    async def run(self, request: CheckedRequest) -> InferAnswer:
        """Runs a request when a runner takes it. Cancelling the task takes it out of the queue.

        Raises:
            QueueFullError: As much waits as may.
            BadRequestError: No batch has room for it.
            ServeError: The class says why.
        """
        request.arrived, request.outcome = time.monotonic(), self._loop.create_future()
        with self._lock:
            try:
                self._batcher.submit(request)
            except BatcherFullError as error:
                raise QueueFullError(str(error), hint="Try again later.") from error
            except ValueError as error:
                raise BadRequestError(str(error), hint="Send its rows in several requests.") from error
            request.waits(self._counted)
            event = self._batcher.next_event(request.arrived)
            if self._batcher.may_take or (event is not None and event < self._wakes):
                self._changed.notify()
        try:
            return await request.by_deadline(request.outcome, _TOO_LATE)
        finally:
            if request.waiting:
                with self._lock:
                    if self._batcher.cancel(request):
                        request.waits_no_more()

    def fail_waiting(self, reason: str) -> None:
        """Answers everything that waits with NotReadyError."""
        with self._lock:
            waiting = list(self._batcher)
        for request in waiting:
            request.end(NotReadyError(reason))

    def stop(self) -> list[threading.Thread]:
        """Lets the runners end after their batch. Returns the threads; join them in another thread."""
        with self._lock:
            self._stopping = True
            self._changed.notify_all()
        return self._threads

    # --- in the runners' threads --------------------------------------------------------------------------------------

    def _call_in_loop(self, function: Callable[..., object], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed, so nobody waits
            self._loop.call_soon_threadsafe(function, *args)

    def _serve(
        self, replica: ModelReplica, make_runner: Callable[[], BatchRunner], started: asyncio.Future[None]
    ) -> None:
        try:
            runner = make_runner()
        except Exception as error:
            self._call_in_loop(started.set_exception, error)
            return
        self._call_in_loop(started.set_result, None)
        while (batch := self._next(replica)) is not None:
            began = time.monotonic()
            outcomes = _outcomes(runner, batch)
            seconds = time.monotonic() - began - runner.waited
            with self._lock:
                self._counted.busy(-1)
                self._batcher.finished(batch, seconds)
            self._call_in_loop(_end, batch.requests, outcomes)
            del batch, outcomes  # the tensors of the last batch are not needed while this thread waits

    def _next(self, replica: ModelReplica) -> Batch[CheckedRequest] | None:
        """Waits for a batch that this replica can run. Returns None when the runner should end: it may be lost."""
        while True:
            if not replica.alive:
                self._restore(replica)
            with self._lock:
                if self._stopping or replica.lost is not None:
                    return None
                if not replica.alive:  # what waits is for the replicas that live
                    continue
                now = time.monotonic()
                if (batch := self._take(now)) is not None:
                    self._counted.busy(1)
                    return batch
                event = self._batcher.next_event(now)
                self._wakes = now + _LIFE_SIGN_SECONDS if event is None else min(event, now + _LIFE_SIGN_SECONDS)
                self._changed.wait(max(self._wakes - now, 0.0))
                self._wakes = math.inf  # of another runner it is not known

    def _take(self, now: float) -> Batch[CheckedRequest] | None:
        """Takes a batch out of the queue, and those that are late."""
        batch = self._batcher.take(now)
        late = self._batcher.late(now)
        for request in (*late, *(batch.requests if batch is not None else ())):
            request.waits_no_more()
        if late:
            self._call_in_loop(_end, late, [DeadlineError(_WOULD_BE_LATE) for _ in late])
        return batch

    def _restore(self, replica: ModelReplica) -> None:
        """Loads a replica again. Nothing may wait for a model that cannot be loaded."""
        if not replica.restore() and not any(each.alive for each in self._replicas):
            self._call_in_loop(self.fail_waiting, replica.failure or "the model was closed")


def _end(requests: Sequence[CheckedRequest], outcomes: Sequence[Outcome]) -> None:
    for request, outcome in zip(requests, outcomes):
        request.end(outcome)


def _outcomes(runner: BatchRunner, batch: Batch[CheckedRequest]) -> Sequence[InferAnswer | ServeError]:
    try:
        return runner.run(batch.requests, batch.taken)
    except Exception as error:  # a fault of the server's own
        _log.error("a runner failed", exc_info=error)
        return [BackendError(f"the runner failed: {error}") for _ in batch.requests]
