"""One version of a model that is served: a method of a load of a package, with its queue and its runners."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from exportkit.serve.batching.batcher import Batcher
from exportkit.serve.engine.checked_request import RequestPlan
from exportkit.serve.engine.dispatcher import Dispatcher
from exportkit.serve.engine.model_description import ModelDescription
from exportkit.serve.engine.package_load import PackageLoad
from exportkit.serve.engine.runners import BatchRunner, RequestRunner, StepRunner
from exportkit.serve.engine.served_sequences import ServedSequences
from exportkit.serve.engine.statistics import Statistics
from exportkit.serve.protocol.http_request import BodyRules
from exportkit.serve.protocol.inference import InferAnswer, InferRequest, SequenceStep
from exportkit.serve.statuses import (
    BackendError,
    BadRequestError,
    CancelledError,
    NotReadyError,
    QueueFullError,
    ServeError,
    TooLargeError,
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
        devices: The device of each replica.
        max_body: The most bytes that a request's tensors can have, by the manifest's ranges and by what may wait.
        body_rules: What the body of a request over HTTP may hold.
        counted: What was counted since the server began to serve this version.
        package: The load of the package, which all of its methods share.
    """

    def __init__(self, described: ModelDescription, package: PackageLoad[ServedModel], counted: Statistics) -> None:
        """Nothing runs yet: `start` starts the runners.

        Args:
            described: What is served.
            package: The load of the package.
            counted: Goes on counting, if the version was served before.

        Raises:
            BackendError: The protocol has no datatype for an input or output.
        """
        self._described = described
        self.name, self.version, self.manifest = described.name, described.version, described.manifest
        self.call, self.method, self.devices = described.call, described.method, described.devices
        self.counted = counted
        self.package = package
        self.max_body = min(described.largest_inputs(), described.limits.max_queued_bytes)
        self.body_rules = BodyRules.of(described.metadata(), self.max_body)
        self._plan = RequestPlan(self.call, batched=described.batching.enabled, stateful=described.stateful)
        self._dispatchers: list[Dispatcher] = []

    async def start(self, *, warm_up: bool) -> None:
        """Starts the runners, and waits until every one is warmed up. Raises what one of them raised."""
        described, replicas, limits = self._described, self.package.replicas, self._described.limits
        self.counted.runners = len(replicas) * described.runners
        kind: type[BatchRunner] = StepRunner if described.stateful else RequestRunner
        # The replica that began a sequence runs its steps, so each replica of a model with state has a queue of its
        # own. A queue never refuses a step: its sequence would go on without it. Each sequence has one step in it.
        if described.stateful:
            limits = replace(limits, max_queued_rows=sys.maxsize, max_queued_bytes=sys.maxsize)
        starting = []
        for group in [[each] for each in replicas] if described.stateful else [replicas]:
            dispatcher = Dispatcher(Batcher(limits, described.batching.max_rows), self.counted)
            self._dispatchers.append(dispatcher)
            for replica in group:
                make_runner = partial(kind, replica, described, self.counted, warm_up=warm_up)
                starting.append(dispatcher.start(replica, make_runner, described.runners))
        await asyncio.gather(*starting)

    def stop(self) -> list[threading.Thread]:
        """Lets the runners end after their batch. Returns the threads; join them in another thread."""
        return [thread for dispatcher in self._dispatchers for thread in dispatcher.stop()]

    @property
    def sequences(self) -> ServedSequences | None:
        """The package's sequences, if each request is a step of one; None: the method has no state."""
        return self.package.sequences if self._described.stateful else None

    @property
    def names(self) -> Collection[str]:
        """The names under which it answers."""
        return [self.name]

    @property
    def ready(self) -> bool:
        """Whether it is warmed up, and neither unloads nor lost its worker process."""
        return self.package.ready

    @property
    def failure(self) -> str | None:
        """Why it is not ready; None if it is."""
        return self.package.failure

    def replica_states(self) -> list[tuple[str, bool]]:
        """Returns the device of each replica, and whether the replica answers."""
        return [(device, replica.alive) for device, replica in zip(self.devices, self.package.replicas)]

    @contextlib.contextmanager
    def admit(self, size: int, *, waits: bool = False) -> Iterator[None]:
        """Reserves room for a body of `size` bytes before it is read; leaving the context gives it back.

        `waits`: it is a step of a sequence in a stream. It waits however many rows do: those behind it, which need its
        state, are on their way.

        Raises:
            TooLargeError: No body can be that large, however few wait.
            QueueFullError: As much waits as may.
            NotReadyError: The model is not ready, or the server drains.
        """
        package = self.package
        if package.closed:
            with package.newest().named(self.name).admit(size, waits=waits):
                yield
            return
        if (error := self._backpressure(size, waits=waits)) is not None:
            self.counted.failed(error.reason)
            raise error
        with package.accepted(size):
            yield

    def _backpressure(self, size: int, *, waits: bool) -> ServeError | None:
        """Returns why a body of so many bytes may not come; None: it may."""
        package, limits, rows = self.package, self._described.limits, self.counted.queued_rows
        held, most_bytes = package.accepted_bytes, limits.max_queued_bytes
        if package.failure is not None and not package.finishes_sequences:
            return NotReadyError(f"the model {self.name} is not ready: {package.failure}")
        if size > most_bytes:
            return TooLargeError(f"the body has {size} bytes, and at most {most_bytes} may wait")
        if held + size > most_bytes:
            why = f"{held} bytes wait, and at most {most_bytes} may: no room for {size} more"
        elif rows >= limits.max_queued_rows and not waits:
            why = f"{rows} rows wait, and at most {limits.max_queued_rows} may"
        else:
            return None
        return QueueFullError(why, hint="Try again later.")

    async def infer(self, request: InferRequest) -> InferAnswer:
        """Answers a request. Cancelling the task takes the request out of the queue.

        Raises:
            ServeError: The class says why.
        """
        return await self.package.model_for(self.name, request).answer(request)

    async def answer(self, request: InferRequest) -> InferAnswer:
        """Answers a request that is for this very model, and counts it: see `PackageLoad.model_for`."""
        accepted = time.perf_counter()
        try:
            with self.package.accepted(0):
                answer = await self._run(request)
        except BaseException as error:
            self.counted.failed(_reason(error), time.perf_counter() - accepted)
            raise
        self.counted.succeeded(answer.timing, time.perf_counter() - accepted)
        return answer

    async def _run(self, request: InferRequest) -> InferAnswer:
        if not self.package.alive and (failure := self.package.replicas[0].failure):
            raise NotReadyError(failure)
        checked = self._plan.check(request)
        if request.sequence is None or self.sequences is None:
            return await self._dispatchers[0].run(checked)
        if request.sequence.start and self.package.leaving is not None:
            raise NotReadyError(f"no sequence of {self.name} begins any more: {self.package.leaving}")
        if checked.rows > self._described.batching.max_rows:
            raise BadRequestError(
                f"the request has {checked.rows} rows, and a batch has 1 to {self._described.batching.max_rows}"
            )
        sizes = sizes_of(self.call.inputs, [tensor.shape for tensor in checked.inputs])
        queues = [dispatcher.run for dispatcher in self._dispatchers]
        checked.waits(self.counted)
        try:
            return await self.sequences.run(request.sequence, self.package, checked, sizes, queues)
        finally:
            checked.waits_no_more()

    def cancel(self, step: SequenceStep) -> None:
        """Ends a sequence whose step ran, and whose answer cannot be told to the client."""
        if self.sequences is not None:
            self.sequences.cancel(step)

    def fail_waiting(self, reason: str) -> None:
        """Answers what waits with NotReadyError."""
        for dispatcher in self._dispatchers:
            dispatcher.fail_waiting(reason)

    def metadata(self) -> dict[str, Any]:
        """Returns the protocol's model metadata: name, versions, platform, inputs and outputs."""
        return self._described.metadata()

    def config(self) -> dict[str, Any]:
        """Returns the model's configuration as Triton's JSON has it."""
        return self._described.config()

    def statistics(self) -> dict[str, Any]:
        """Returns an element of `model_stats` of Triton's statistics JSON."""
        return self.counted.to_json(self.name, self.version)


def _reason(error: BaseException) -> str:
    """Returns the label of a failure in the metrics."""
    if isinstance(error, ServeError):
        return error.reason
    return CancelledError.reason if isinstance(error, asyncio.CancelledError) else BackendError.reason
