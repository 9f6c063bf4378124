"""One version of a model that is served."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

from exportkit.package.manifest import Call, Manifest
from exportkit.serve.batching.batcher import Batcher
from exportkit.serve.engine.accepted import AcceptedRequests, Admission, WaitingStep
from exportkit.serve.engine.checked_request import CheckedRequest, RequestPlan
from exportkit.serve.engine.dispatcher import Dispatcher
from exportkit.serve.engine.execution import BatchResult, BatchRunner
from exportkit.serve.engine.home import Answering, Home, PackageMethods
from exportkit.serve.engine.loaded_package import LoadedCopies
from exportkit.serve.engine.model_description import DEFAULT_PRIORITY
from exportkit.serve.engine.own_thread import in_own_thread
from exportkit.serve.engine.queued_request import Answered
from exportkit.serve.engine.served_sequences import ServedSequences
from exportkit.serve.engine.statistics import Statistics
from exportkit.serve.engine.steps import StepRequest, StepRunner
from exportkit.serve.process_settings import give_freed_memory_back
from exportkit.serve.protocol.http_request import BodyRules
from exportkit.serve.protocol.inference import InferAnswer, InferRequest, SequenceStep
from exportkit.serve.statuses import (
    BackendError,
    BadRequestError,
    CancelledError,
    DeadlineError,
    NotReadyError,
    ServeError,
)
from exportkit.sizes import sizes_of


class ServedModel:
    """A method of a loaded package with its queue and its runners. All methods are for the event loop's thread.

    Attributes:
        name: The name by which it is served.
        version: Its version, as text.
        manifest: The package's manifest.
        call: How the method is called.
        method: Its name.
        devices: The device of each copy.
        max_body: The most bytes that a request's tensors can have, by the manifest's ranges and by what may wait.
        body_rules: What the body of a request over HTTP may hold.
        counted: What was counted since the server began to serve this version.
        package: The methods of the same load; None: it is closed.
    """

    name: str
    version: str
    manifest: Manifest
    call: Call
    method: str
    devices: tuple[str, ...]
    max_body: int
    body_rules: BodyRules
    counted: Statistics

    def __init__(
        self,
        loaded: LoadedCopies,
        counted: Statistics,
        sequences: ServedSequences | None = None,
        home: Home | None = None,
    ) -> None:
        """Starts the runners. `prepared` says when they are ready.

        Args:
            loaded: What to serve.
            counted: Goes on counting, if the version was served before.
            sequences: The package's sequences, for a method with state.
            home: The load, which the methods with state share.
        """
        self._described = described = loaded.described
        self.name, self.version, self.manifest = described.name, described.version, described.manifest
        self.call, self.method = described.call, self.manifest.method(described.method).name
        self.devices = described.devices
        self.counted = counted
        counted.runners = len(loaded.copies) * described.runners
        self.versions: Callable[[], Sequence[str]] = lambda: [described.version]
        self.package: PackageMethods[ServedModel] | None = None
        self.max_body = min(described.largest_inputs(), described.limits.max_queued_bytes)
        self._limits = described.limits
        self._metadata = described.metadata()
        self.body_rules = BodyRules.of(self._metadata, self.max_body)
        self._copies = loaded.copies
        stateful = described.stateful
        self._plan = RequestPlan(self.call, batched=described.batching.enabled, stateful=stateful)
        self._sequences, self._home = (sequences, home) if stateful else (None, None)
        # The copy that began a sequence runs its steps, so each copy of a model with state has a queue of its own. A
        # queue never refuses a step: its sequence would go on without it. Each sequence has one step in it at most.
        queues = [(copy,) for copy in loaded.copies] if stateful else [loaded.copies]
        limits = described.limits
        if stateful and home is not None:
            home.models[self.method] = self
            limits = replace(limits, max_queued_rows=sys.maxsize, max_queued_bytes=sys.maxsize)
        batched = described.batching.dimension
        self._dispatchers = [Dispatcher(Batcher(limits, described.batching.max_rows), counted) for _ in queues]
        for dispatcher, copies in zip(self._dispatchers, queues):
            for copy in copies:
                kind = partial(StepRunner, dimension=batched.name if batched else None) if stateful else BatchRunner
                make_runner = partial(kind, copy, self.call.outputs, counted, warm_up=loaded.warm_up)
                dispatcher.start(copy, make_runner, described.runners)
        self._accepted = AcceptedRequests()
        self._leaving: str | None = None  # why no new request is accepted
        self._closed = False
        self._next: Callable[[], ServedModel | None] | None = None

    async def prepared(self) -> None:
        """Waits until every runner is warmed up. If one fails, the model is closed, and its error is raised."""
        try:
            await asyncio.gather(*(dispatcher.prepared() for dispatcher in self._dispatchers))
        except Exception:  # whatever the load raised, no thread stays behind
            await self.close()
            raise

    @property
    def sequences(self) -> ServedSequences | None:
        """The package's sequences, if each request is a step of one; None: the method has no state."""
        return self._sequences

    @property
    def names(self) -> Collection[str]:
        """The names under which it answers."""
        return [self.name]

    @property
    def ready(self) -> bool:
        """Whether it is warmed up, and neither unloads nor lost its worker process."""
        return self._leaving is None and any(copy.alive for copy in self._copies)

    @property
    def failure(self) -> str | None:
        """Why it is not ready; None if it is."""
        if self.ready:
            return None
        return self._leaving or self._copies[0].failure or "its worker process died and starts again"

    def copies(self) -> list[tuple[str, bool]]:
        """Returns the device of each copy, and whether the copy answers."""
        return [(device, copy.alive) for device, copy in zip(self.devices, self._copies)]

    @property
    def lost(self) -> str | None:
        """Why this process can never answer again; None if it can, or will."""
        return None if any(copy.lost is None for copy in self._copies) else self._copies[0].lost

    def admit(self, size: int, *, waits: bool = False) -> AbstractContextManager[None]:
        """Reserves room for a body of `size` bytes before it is read; leaving the context gives it back.

        `waits`: it is a step of a sequence in a stream. It waits however many rows do: those behind it, which need its
        state, are on their way.

        Raises:
            TooLargeError: No body can be that large, however few wait.
            QueueFullError: As much waits as may.
            NotReadyError: The model is not ready, or the server drains.
        """
        if self._closed and self._successor is not None:
            return self._successor.admit(size, waits=waits)
        self._check_room(size, waits=waits)
        return Admission(self._accepted, size)

    def of_method(self, method: str | None) -> ServedModel:
        """Returns the model that a request means that asks this one for a method.

        Raises:
            BadRequestError: This is another method.
            NotServedError: There is no such method.
        """
        if method in (None, self.method) or self.package is None:
            return self
        return self.package.chosen(self.name, method)

    async def infer(self, request: InferRequest) -> InferAnswer:
        """Answers a request. Cancelling the task takes the request out of the queue.

        Raises:
            ServeError: The class says why.
        """
        if request.method is not None and (named := self.of_method(request.method)) is not self:
            return await named.infer(request)
        if (other := self._other(request)) is not None:
            return await other.infer(request)
        accepted = time.perf_counter()
        try:
            with Admission(self._accepted, 0):
                ran = await self._run(request)
        except BaseException as error:
            self.counted.failed(_reason(error), time.perf_counter() - accepted)
            raise
        self.counted.succeeded(ran.timing, time.perf_counter() - accepted)
        return InferAnswer(self.name, self.version, request.id, ran.outputs, ran.timing)

    async def _run(self, request: InferRequest) -> BatchResult:
        if self._closed:
            raise NotReadyError(f"the model {self.name} was unloaded")
        if not any(copy.alive for copy in self._copies) and (failure := self._copies[0].failure):
            raise NotReadyError(failure)
        checked = self._plan.check(request)
        if request.timeout is not None and request.timeout <= 0:
            raise DeadlineError("the request's timeout passed before it arrived")
        if request.sequence is None or self._sequences is None or self._home is None:
            priority = request.priority or DEFAULT_PRIORITY
            return await self._dispatchers[0].run(checked, priority=priority, timeout=request.timeout)
        if request.sequence.start:
            self._check_begins()
        if checked.rows > self._described.batching.max_rows:
            raise BadRequestError(
                f"the request has {checked.rows} rows, and a batch has 1 to {self._described.batching.max_rows}"
            )
        return await self._run_step(request, checked, self._sequences, self._home)

    async def _run_step(
        self, request: InferRequest, checked: CheckedRequest, sequences: ServedSequences, home: Home
    ) -> BatchResult:
        answer: asyncio.Future[BatchResult | ServeError] = asyncio.get_running_loop().create_future()

        def answered(outcome: BatchResult | ServeError) -> None:
            if not answer.done():  # else the task was cancelled
                answer.set_result(outcome)

        assert request.sequence is not None
        waiting = WaitingStep(self.counted, checked)

        def run(ready: StepRequest, copy: int, timeout: float | None, answered: Answered) -> Callable[[], None]:
            waiting.close()
            dispatcher, priority = self._dispatchers[copy], request.priority or DEFAULT_PRIORITY
            return partial(dispatcher.give_up, dispatcher.submit(ready, answered, priority=priority, timeout=timeout))

        sizes = sizes_of(self.call.inputs, [tensor.shape for tensor in checked.inputs])
        with contextlib.closing(waiting):
            step = sequences.begin_step(request.sequence, home, checked, sizes, run, request.timeout, answered)
            try:
                outcome = await answer
            except BaseException:
                step.give_up()
                raise
        if isinstance(outcome, ServeError):
            raise outcome
        return outcome

    def give_up(self, step: SequenceStep) -> None:
        """Ends a sequence whose step ran, and whose answer cannot be told to the client."""
        if self._sequences is not None:
            self._sequences.give_up(step)

    def _check_begins(self) -> None:
        if self._leaving is not None:
            raise NotReadyError(f"no sequence of {self.name} begins any more: {self._leaving}")

    def _other(self, request: InferRequest) -> Answering | None:
        """Returns the model that answers in this one's place: the version that a sequence began with, or the next."""
        if self._sequences is not None and request.sequence is not None:
            began = self._sequences.model(request.sequence, self.method)
            if began is not None:
                return None if began is self else began
            if request.sequence.start:  # on this load it would have to end soon
                return self._successor
        return self._successor if self._closed else None

    def metadata(self) -> dict[str, Any]:
        """Returns the protocol's model metadata: name, versions, platform, inputs and outputs."""
        return {**self._metadata, "versions": list(self.versions())}

    def config(self) -> dict[str, Any]:
        """Returns the model's configuration as Triton's JSON has it."""
        return self._described.config()

    def statistics(self) -> dict[str, Any]:
        """Returns an element of `model_stats` of Triton's statistics JSON."""
        return self.counted.to_json(self.name, self.version)

    def refuse_new(self, reason: str, *, waiting: bool = False) -> None:
        """Accepts no more bodies. What was accepted is answered; what waits, on demand, with NotReadyError."""
        self._leaving = reason
        for dispatcher in self._dispatchers if waiting else ():
            dispatcher.fail_waiting(lambda: NotReadyError(reason))

    async def close(self, successor: Callable[[], ServedModel | None] | None = None) -> None:
        """Frees the model once it has answered everything that it accepted.

        Args:
            successor: Returns who takes what still arrives here. (Were it the model itself, whoever holds an old one
                would keep all those that came after it.)
        """
        self._next = successor
        if self._sequences is not None and self._home is not None:
            await self._sequences.finish(self._home)
        await self._accepted.none()
        self._closed, self.package = True, None
        if self._home is not None:
            self._home.models.pop(self.method, None)
        self._leaving = self._leaving or "it was unloaded"
        threads = [thread for dispatcher in self._dispatchers for thread in dispatcher.stop()]
        await in_own_thread(self._free, threads)

    def _free(self, threads: Sequence[Any]) -> None:
        for copy in self._copies:
            copy.close()
        for thread in threads:
            thread.join()
        give_freed_memory_back()

    @property
    def _successor(self) -> ServedModel | None:
        """Who takes what still arrives here; None: it was not exchanged. Raises NotReadyError if nobody does."""
        if self._next is None:
            return None
        if (following := self._next()) is None:
            raise NotReadyError(f"the model {self.name} was unloaded")
        return following

    @property
    def _goes_on(self) -> bool:
        """Whether it leaves, and sequences that run on it may end before."""
        return self._leaving is not None and not self._closed and self._home is not None and self._home.count > 0

    def _check_room(self, size: int, *, waits: bool = False) -> None:
        error: ServeError | None
        if self.failure is not None and not self._goes_on:
            error = NotReadyError(f"the model {self.name} is not ready: {self.failure}")
        else:
            rows = 0 if waits else self.counted.queued_rows
            error = self._accepted.why_no_room(size, self._limits, rows)
        if error is not None:
            self.counted.failed(error.reason)
            raise error


def _reason(error: BaseException) -> str:
    """Returns the label of a failure in the metrics."""
    if isinstance(error, ServeError):
        return error.reason
    return CancelledError.reason if isinstance(error, asyncio.CancelledError) else BackendError.reason
