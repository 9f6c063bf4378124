"""The sequences of a package: who has them, on which version each runs, and when its next step may."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping

from exportkit.runtime.state import state_bytes
from exportkit.serve.engine.checked_request import CheckedRequest
from exportkit.serve.engine.execution import BatchResult
from exportkit.serve.engine.home import Answering, Home
from exportkit.serve.engine.pending_steps import OneSequence, PendingStep, Run, SequencePlace
from exportkit.serve.engine.queued_request import Answered
from exportkit.serve.engine.sequence_rules import ended, gone, key_of, reason_of, state_sizes
from exportkit.serve.engine.steps import HeldSession, StepRequest
from exportkit.serve.protocol.inference import SequenceStep
from exportkit.serve.sequences.table import (
    NoSequenceError,
    Reason,
    SequenceLimits,
    SequencesFullError,
    SequenceTable,
)
from exportkit.serve.statuses import (
    BadRequestError,
    DeadlineError,
    QueueFullError,
    ServeError,
    TooLargeError,
)

_SWEEP_SECONDS = 1.0  # how often it is looked whether a sequence idles for too long, or lost its process


class ServedSequences:
    """The sequences of a package, whatever the versions on which they run. All methods are for the event loop's thread.

    Attributes:
        name: The name of the package.
        limits: How many there may be, and for how long.
    """

    def __init__(self, name: str, limits: SequenceLimits) -> None:
        """There are none yet. `name` is the package's."""
        self.limits = limits
        self.name = name
        self._table: SequenceTable[SequencePlace, PendingStep] = SequenceTable(limits)
        self._timer: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()  # one of them ended
        self._closing: set[asyncio.Future[None]] = set()

    @property
    def count(self) -> int:
        """The number of sequences."""
        return self._table.count

    @property
    def state_bytes(self) -> int:
        """The bytes of their state."""
        return self._table.size

    @property
    def ended(self) -> Counter[Reason]:
        """How many ended, by reason."""
        return self._table.ended

    @property
    def oldest(self) -> float:
        """The seconds since the oldest began; 0 if there is none."""
        first = next(iter(self._table), None)
        return 0.0 if first is None else time.monotonic() - first.began

    def model(self, step: SequenceStep, method: str) -> Answering | None:
        """Returns what answers the next step of a sequence: the version that it began with.

        None: there is no such sequence, or it begins.

        Raises:
            BadRequestError: The version of the sequence has no such method.
        """
        if step.start:
            return None
        try:
            home = self._table.find(key_of(step)).payload.home
        except NoSequenceError:
            return None
        if method not in home.models:
            raise BadRequestError(f"the sequence began with version {home.manifest.version}, which has no {method}")
        return home.models[method]

    def begin_step(
        self,
        step: SequenceStep,
        home: Home,
        request: CheckedRequest,
        sizes: Mapping[str, int],
        run: Run,
        timeout: float | None,
        answered: Answered,
    ) -> PendingStep:
        """Answers a step when it is its turn.

        Args:
            step: The step.
            home: The load that begins a new sequence.
            request: The request, which the method takes.
            sizes: The sizes of the request's dimensions.
            run: Runs it.
            timeout: Seconds within which the answer must be there. None: as long as it takes.
            answered: Gets the answer or the error, once, and never before this returns. Each error of `run` ends the
                sequence; and one that ends before it is the step's turn answers with a SequenceError.

        Raises:
            SequenceError: There is no such sequence.
            QueueFullError: There is no room for one more.
            TooLargeError: There never is for one of this size.
            BadRequestError: The request has other sizes than its sequence.
        """
        now = time.monotonic()
        sequence = self._begun(step, home, sizes, now) if step.start else self._found(step, sizes)
        pending = PendingStep(self, sequence, request, run, answered)
        if timeout is not None:
            pending.deadline = now + timeout
        if self._table.submit(sequence, pending, last=step.end):
            self._run(pending)
        elif timeout is not None:
            pending.timer = asyncio.get_running_loop().call_later(timeout, self._expire, pending)
        return pending

    def _run(self, pending: PendingStep) -> None:
        """It is a step's turn."""
        if pending.timer is not None:
            pending.timer.cancel()
        left = None if pending.deadline is None else pending.deadline - time.monotonic()
        place = pending.sequence.payload
        try:
            pending.give_up_run = pending.run(StepRequest(pending.request, place.held), place.copy, left, pending)
        except ServeError as error:
            asyncio.get_running_loop().call_soon(pending, error)

    def _expire(self, pending: PendingStep) -> None:
        if not pending.over and pending.give_up_run is None:
            late = "the request's timeout passed before the steps before it were answered"
            self.answered(pending, DeadlineError(late))

    def answered(self, pending: PendingStep, outcome: BatchResult | ServeError) -> None:
        """A step has its answer, and the next one of its sequence may run."""
        if pending.over:
            return
        pending.over = True
        sequence = pending.sequence
        if isinstance(outcome, ServeError):
            self._end(sequence, reason_of(outcome, sequence.payload.held))
        else:
            self._go_on(sequence)
        pending.answered(outcome)

    def _go_on(self, sequence: OneSequence) -> None:
        """The step of a sequence that ran is answered."""
        following = self._table.answered(sequence, time.monotonic())
        if following is not None:
            self._run(following)
        elif sequence.ended is not None:
            self._take_ended()

    def ended_by(self, pending: PendingStep, reason: Reason) -> None:
        """Ends the sequence of a step that is given up."""
        if pending.over:
            return
        pending.over = True
        if pending.timer is not None:
            pending.timer.cancel()
        if pending.give_up_run is not None:
            pending.give_up_run()
        self._end(pending.sequence, "lost" if pending.sequence.payload.held.lost else reason)

    def give_up(self, step: SequenceStep) -> None:
        """Ends a sequence whose step ran, and whose answer cannot be told to the client."""
        if self._table.has(key_of(step)):
            self._end(self._table.find(key_of(step)), "unanswered")

    async def finish(self, home: Home) -> None:
        """Waits until the sequences of a load have ended, for a time. Ends those that are left."""
        end = time.monotonic() + self.limits.finish_seconds
        while home.count and (left := end - time.monotonic()) > 0:
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), left)
            except TimeoutError:
                break
        for sequence in self._table:
            if sequence.payload.home is home:
                self._end(sequence, "unloaded")
        if self._closing:
            await asyncio.wait(self._closing)

    # --- beginning and ending -----------------------------------------------------------------------------------------

    def _begun(self, step: SequenceStep, home: Home, given: Mapping[str, int], now: float) -> OneSequence:
        sizes = state_sizes(home.manifest, given)
        size = state_bytes(home.manifest, sizes)
        self._table.end_idle(now)
        copy = home.emptiest()
        place = SequencePlace(home, copy, HeldSession(sizes))
        if size > self.limits.most_bytes:
            raise TooLargeError(
                f"the state of this sequence of {self.name} would have {size} bytes, "
                f"and all sequences may have {self.limits.most_bytes}",
                hint="`exportkit serve --max-sequence-bytes` allows more.",
            )
        try:
            sequence = self._table.begin(key_of(step), place, size, now)
        except SequencesFullError as error:
            raise QueueFullError(f"no sequence of {self.name} can begin: {error}", hint="Try again later.") from error
        home.counts[copy] += 1
        self._take_ended()
        self._set_timer()
        return sequence

    def _found(self, step: SequenceStep, sizes: Mapping[str, int]) -> OneSequence:
        try:
            sequence = self._table.find(key_of(step))
            if sequence.payload.held.lost:
                self._end(sequence, "lost")
                sequence = self._table.find(key_of(step))
        except NoSequenceError as error:
            raise gone(self.name, step, error.reason) from error
        for name, number in sequence.payload.held.sizes.items():
            if sizes.get(name, number) != number:
                raise BadRequestError(f"the sequence began with {name}={number}, and this request has {sizes[name]}")
        return sequence

    def _end(self, sequence: OneSequence, reason: Reason) -> None:
        """Ends a sequence, unless it has ended, and refuses the steps that wait."""
        waited = self._table.end(sequence, reason)
        for pending in waited:
            if not pending.over:
                pending.over = True
                if pending.timer is not None:
                    pending.timer.cancel()
                pending.answered(ended(reason))
        self._take_ended()

    def _take_ended(self) -> None:
        """Frees the sessions of sequences that ended, in another thread: a worker may have to be told."""
        for sequence in self._table.take_ended():
            place = sequence.payload
            place.home.counts[place.copy] -= 1
            self._changed.set()
            closing = asyncio.get_running_loop().run_in_executor(None, place.held.close)
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    def _sweep(self) -> None:
        self._table.end_idle(time.monotonic())
        for sequence in self._table:
            if sequence.payload.held.lost and not sequence.busy:
                self._end(sequence, "lost")
        self._take_ended()

    def _set_timer(self) -> None:
        if self._timer is None and self._table.count:
            seconds = min(_SWEEP_SECONDS, self.limits.idle_seconds / 2)
            self._timer = asyncio.get_running_loop().call_later(seconds, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._sweep()
        self._set_timer()
