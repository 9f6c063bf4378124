"""The sequences of a package: who has them, on which load each runs, and when its next step may."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from exportkit.package.manifest import Manifest
from exportkit.serve.engine.checked_request import CheckedRequest
from exportkit.serve.engine.held_session import AGAIN, HeldSession, SequenceLoad, adapter_file
from exportkit.serve.protocol.inference import InferAnswer, SequenceStep
from exportkit.serve.sequences.table import (
    NoSequenceError,
    OpenSequence,
    Reason,
    SequenceLimits,
    SequencesFullError,
    SequenceTable,
)
from exportkit.serve.statuses import (
    BadRequestError,
    DeadlineError,
    QueueFullError,
    SequenceError,
    ServeError,
    TooLargeError,
)
from exportkit.sizes import state_bytes, state_dimensions

_SWEEP_SECONDS = 1.0  # how often it is looked whether a sequence idles for too long, or lost its process
_TOO_LATE = "the request's timeout passed before the steps before it were answered"

_WHY: dict[Reason, str] = {
    "end": "its last step was answered",
    "restarted": "another one was begun in its place",
    "idle": "no step came for too long",
    "failed": "the model failed on one of its steps",
    "unanswered": "one of its steps was given up, and may have changed the state",
    "lost": "the process with its state died",
    "unloaded": "its version of the model was unloaded, or the server ends",
}


_Turn = asyncio.Future[ServeError | None]  # of a step: it may run, or its sequence ended before
_Sequence = OpenSequence[HeldSession, _Turn]


class ServedSequences:
    """The sequences of a package, whatever the loads on which they run. All methods are for the event loop's thread.

    Attributes:
        name: The name of the package.
        limits: How many there may be, and for how long.
    """

    def __init__(self, name: str, limits: SequenceLimits, adapters: Path | None = None) -> None:
        """There are none yet. `name` is the package's; `adapters` has a folder of each that a sequence may name."""
        self._adapters = adapters
        self.limits = limits
        self.name = name
        self._table: SequenceTable[HeldSession, _Turn] = SequenceTable(limits)
        self._running: Counter[tuple[SequenceLoad, int]] = Counter()  # by load and replica
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

    def on(self, load: SequenceLoad, replica: int | None = None) -> int:
        """Returns the number of sequences that run on a load, or on one of its replicas."""
        replicas = range(len(load.replicas)) if replica is None else (replica,)
        return sum(self._running[load, place] for place in replicas)

    def load_of(self, step: SequenceStep) -> SequenceLoad | None:
        """Returns the load on which a sequence began; None: there is no such sequence."""
        try:
            return self._table.find(_key_of(step)).payload.load
        except NoSequenceError:
            return None

    async def run(
        self,
        step: SequenceStep,
        load: SequenceLoad,
        request: CheckedRequest,
        sizes: Mapping[str, int],
        queues: Sequence[Callable[[CheckedRequest], Awaitable[InferAnswer]]],
    ) -> InferAnswer:
        """Answers a step when it is its turn. A step that is not answered ends its sequence.

        Args:
            step: The step.
            load: The load that begins a new sequence.
            request: The request, which the model takes.
            sizes: The sizes of the request's dimensions.
            queues: Runs a step on a replica, by its number.

        Raises:
            SequenceError: There is no such sequence, or it ended before it was the step's turn.
            QueueFullError: There is no room for one more.
            TooLargeError: There never is for one of this size.
            BadRequestError: The request has other sizes than its sequence, or there is no such adapter.
            ServeError: The class says why it was not answered.
        """
        sequence = self._begun(step, load, sizes) if step.start else self._found(step, sizes)
        held = request.session = sequence.payload
        turn: _Turn = asyncio.get_running_loop().create_future()
        if self._table.submit(sequence, turn, last=step.end):
            turn.set_result(None)
        try:
            await request.by_deadline(turn, _TOO_LATE)
            answer = await queues[held.replica](request)
        except BaseException as error:
            given_up = isinstance(error, (asyncio.CancelledError, DeadlineError))
            self._end(sequence, "lost" if held.lost else "unanswered" if given_up else "failed")
            raise
        following = self._table.answered(sequence, time.monotonic())
        if following is not None and not following.done():  # else its client left, and it ends the sequence
            following.set_result(None)
        self._take_ended()
        return answer

    def cancel(self, step: SequenceStep) -> None:
        """Ends a sequence whose step ran, and whose answer cannot be told to the client."""
        with contextlib.suppress(NoSequenceError):
            self._end(self._table.find(_key_of(step)), "unanswered")

    async def finish(self, load: SequenceLoad) -> None:
        """Waits until the sequences of a load have ended, for a time. Ends those that are left."""
        end = time.monotonic() + self.limits.finish_seconds
        while self.on(load) and (left := end - time.monotonic()) > 0:
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), left)
            except TimeoutError:
                break
        for sequence in self._table:
            if sequence.payload.load is load:
                self._end(sequence, "unloaded")
        if self._closing:
            await asyncio.wait(self._closing)

    # --- beginning and ending -----------------------------------------------------------------------------------------

    def _begun(self, step: SequenceStep, load: SequenceLoad, given: Mapping[str, int]) -> _Sequence:
        sizes = _state_sizes(load.manifest, given)
        size = state_bytes(load.manifest, sizes)
        now = time.monotonic()
        self._table.end_idle(now)
        if size > self.limits.most_bytes:
            raise TooLargeError(
                f"the state of this sequence of {self.name} would have {size} bytes, "
                f"and all sequences may have {self.limits.most_bytes}",
                hint="`exportkit serve --max-sequence-bytes` allows more.",
            )
        adapter = None if step.adapter is None else adapter_file(self._adapters, step.adapter)
        places = range(len(load.replicas))  # one that lives, with the fewest sequences
        replica = min(places, key=lambda place: (not load.replicas[place].alive, self.on(load, place)))
        try:
            sequence = self._table.begin(_key_of(step), HeldSession(load, replica, sizes, adapter), size, now)
        except SequencesFullError as error:
            raise QueueFullError(f"no sequence of {self.name} can begin: {error}", hint="Try again later.") from error
        self._running[load, replica] += 1
        self._take_ended()
        self._set_timer()
        return sequence

    def _found(self, step: SequenceStep, sizes: Mapping[str, int]) -> _Sequence:
        try:
            sequence = self._table.find(_key_of(step))
            if sequence.payload.lost:
                self._end(sequence, "lost")
                sequence = self._table.find(_key_of(step))
        except NoSequenceError as error:
            raise _gone(self.name, step, error.reason) from error
        for name, number in sequence.payload.sizes.items():
            if sizes.get(name, number) != number:
                raise BadRequestError(f"the sequence began with {name}={number}, and this request has {sizes[name]}")
        return sequence

    def _end(self, sequence: _Sequence, reason: Reason) -> None:
        """Ends a sequence, unless it has ended, and refuses the steps that wait."""
        for turn in self._table.end(sequence, reason):
            if not turn.done():
                turn.set_result(SequenceError(f"the sequence ended: {_WHY[reason]}", hint=AGAIN))
        self._take_ended()

    def _take_ended(self) -> None:
        """Frees the sessions of sequences that ended, in another thread: a worker may have to be told."""
        for sequence in self._table.take_ended():
            self._running[place := (sequence.payload.load, sequence.payload.replica)] -= 1
            if not self._running[place]:  # a load that ended is not kept
                del self._running[place]
            self._changed.set()
            closing = asyncio.get_running_loop().run_in_executor(None, sequence.payload.close)
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    def _set_timer(self) -> None:
        if self._timer is None and self._table.count:
            seconds = min(_SWEEP_SECONDS, self.limits.idle_seconds / 2)
            self._timer = asyncio.get_running_loop().call_later(seconds, self._sweep)

    def _sweep(self) -> None:
        self._timer = None
        self._table.end_idle(time.monotonic())
        for sequence in self._table:
            if sequence.payload.lost and not sequence.steps:
                self._end(sequence, "lost")
        self._take_ended()
        self._set_timer()


def _key_of(step: SequenceStep) -> tuple[str, int | str]:
    """Returns whose a sequence is, and its id."""
    return step.owner, step.id


def _gone(name: str, step: SequenceStep, reason: Reason | None) -> SequenceError:
    """Returns the answer to a step of a sequence that is not there."""
    if reason is None:
        return SequenceError(
            f"{name} has no sequence {step.id!r}",
            hint="It never began, ended long ago, or another replica has or had it. "
            "Begin it again under another id, with `sequence_start`.",
        )
    return SequenceError(f"the sequence {step.id!r} of {name} ended: {_WHY[reason]}", hint=AGAIN)


def _state_sizes(manifest: Manifest, given: Mapping[str, int]) -> dict[str, int]:
    """Returns the sizes of a new session. Raises BadRequestError if the first request does not say them all."""
    wanted = state_dimensions(manifest)
    if missing := [name for name in wanted if name not in given]:
        raise BadRequestError(
            f"the state has the size {missing[0]}, which the inputs of this method do not have",
            hint="Begin the sequence with another method.",
        )
    return {name: given[name] for name in wanted}
