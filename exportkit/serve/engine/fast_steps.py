"""Plain steps of sequences take a way through C++: this side says which may, and what else has to be done.

A sequence that rests is lent to the library (csrc/steps), which then reads its steps, queues them and makes their
answers. Whatever else happens to it takes it back first, so that Python's table stays the only truth about it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from ctypes import POINTER, byref, c_double, c_uint32, c_uint64
from typing import Any, Protocol

from exportkit.serve.engine.fast_queue import FastBatch, FastForm, FastQueue, Owner
from exportkit.serve.engine.statistics import REQUEST_SECONDS
from exportkit.serve.engine.step_batches import OpenState
from exportkit.serve.engine.step_library import (
    Dropped,
    FinishedBatch,
    ReadResult,
    StepAnswers,
    StepLibrary,
    numbers,
    pointers,
)
from exportkit.serve.statuses import SequenceError, ServeError

CountSteps = Callable[[str, str, int], None]
"""Counts answered steps of a model and its version."""


class FastCall(Protocol):
    """A stream of requests."""

    def read(self, frame_bytes: int, message_bytes: int, /) -> None:
        """Steps of it were read."""

    def send(self, answers: StepAnswers, /) -> None:
        """Sends answers, which are in their order."""

    def failed(self, place: int, sequence: FastSequence, error: ServeError, /) -> None:
        """A step has no answer."""


class Lender(Protocol):
    """Whose sequences are lent."""

    def rested(self, sequence: Any, /) -> None:
        """The last step of one that was taken back is answered."""

    def step_failed(self, sequence: Any, error: ServeError, /) -> None:
        """A step failed."""

    def left(self, sequence: Any, /) -> None:
        """The client of a step left."""

    def used(self, sequence: Any, when: float, /) -> None:
        """It had a step then."""


class FastSequence:
    """A sequence that is lent.

    Attributes:
        number, handle: The library's.
        id: Its id.
        queue: Where its steps wait.
        lender: Whose it is.
        sequence: What the lender knows it by.
        left: Whether it was taken back, and has steps that are not answered.
    """

    __slots__ = ("_state", "_steps", "handle", "id", "left", "lender", "number", "queue", "sequence")

    def __init__(self, steps: FastSteps, number: int, handle: Any, lent: Lent, state: OpenState) -> None:
        """Keeps the rows of the state until no step has them any more."""
        self._steps = steps
        self._state = state
        self.number = number
        self.handle = handle
        self.id = lent.key[1]
        self.queue = lent.queue
        self.lender = lent.lender
        self.sequence = lent.sequence
        self.left = False

    def take_back(self) -> bool:
        """Reads no more of its steps. Returns whether some are not answered: `Lender.rested` says when they are."""
        self.left = True
        return self._steps.take_back(self)

    def close(self, error: SequenceError) -> None:
        """Ends it: all steps but the one that runs get the error."""
        self._steps.close(self, error)


class Lent:
    """What is lent: a sequence, its key, its queue and the form of its steps."""

    __slots__ = ("form", "key", "lender", "queue", "sequence")

    def __init__(self, lender: Lender, sequence: Any, key: tuple[str, int | str], queue: FastQueue, form: int) -> None:
        self.lender = lender
        self.sequence = sequence
        self.key = key
        self.queue = queue
        self.form = form


class FastSteps:
    """All plain steps of a server. All methods are for the event loop's thread.

    Attributes:
        calls: The streams of requests that may have some, by number.
        count: Counts answered steps.
    """

    def __init__(self, library: StepLibrary, count: CountSteps) -> None:
        """There are none yet."""
        self.library = library
        self.calls: dict[int, FastCall] = {}
        self.count = count
        self._handle = library.open((c_double * len(REQUEST_SECONDS))(*REQUEST_SECONDS), len(REQUEST_SECONDS))
        self._queues: dict[int, FastQueue] = {}
        self._sequences: dict[int, FastSequence] = {}
        self._owners: dict[str, int] = {}
        self._numbers = 0
        self._reads = False  # in this turn of the loop

    def new_number(self) -> int:
        """Returns a number that nothing else has; not 0."""
        self._numbers += 1
        return self._numbers

    def owner(self, name: str) -> int:
        """Returns the number of a client."""
        return self._owners.setdefault(name, len(self._owners))

    def add_form(self, head: bytes, sizes: Sequence[int], places: Sequence[int], rows: int) -> int:
        """Learns what stands before inputs, their sizes, and the places of the model's among them."""
        order = [places.index(place) for place in range(len(places))]
        number = self.new_number()
        array = (c_uint32 * len(order))(*order)
        self.library.add_form(self._handle, number, head, len(head), numbers(list(sizes)), array, len(order), rows)
        return number

    def remove_form(self, number: int) -> None:
        """Forgets it."""
        self.library.remove_form(self._handle, number)

    def open_queue(self, owner: Owner, form: FastForm) -> FastQueue:
        """Returns a new queue."""
        queue = FastQueue(self.library, self._handle, self.new_number(), owner, form)
        self._queues[queue.number] = queue
        return queue

    def close_queue(self, queue: FastQueue) -> None:
        """Forgets a queue, which is freed when no sequence and no runner has it."""
        self.count_read()
        self._queues.pop(queue.number, None)

    def lend(self, lent: Lent, state: OpenState, addresses: list[int]) -> FastSequence:
        """Reads the steps of a sequence from now on. `addresses` are those of its rows of each tensor."""
        owner, name = lent.key
        text = b"" if isinstance(name, int) else name.encode()
        number = self.new_number()
        handle = self.library.open_sequence(
            lent.queue.handle,
            number,
            lent.form,
            self.owner(owner),
            isinstance(name, int),
            name if isinstance(name, int) else 0,
            text,
            len(text),
            pointers(addresses),
        )
        found = self._sequences[number] = FastSequence(self, number, handle, lent, state)
        return found

    # --- connections --------------------------------------------------------------------------------------------------

    def open_client(self) -> Any:
        """Returns the library's handle of a new connection."""
        return self.library.open_client(self._handle)

    def read(self, client: Any, data: bytes, at: int) -> int:
        """Reads frames of plain steps. Returns where the first other one begins."""
        if not self._reads:
            self._begin_reading()
        return self.library.read(client, data, len(data), at)

    def read_message(self, call: Any, message: bytes) -> bool:
        """Reads a message. Returns whether it is a plain step, which is queued now."""
        if not self._reads:
            self._begin_reading()
        return bool(self.library.read_message(call, message, len(message)))

    def _begin_reading(self) -> None:
        self._reads = True
        asyncio.get_running_loop().call_soon(self.count_read)
        for queue in self._queues.values():
            queue.make_room()

    def count_read(self) -> None:
        """Counts what was read in this turn of the loop. Call it before you change a call or a queue."""
        if not self._reads:
            return
        self._reads = False
        found = ReadResult()
        self.library.count_read(self._handle, byref(found))
        for read in found.calls[: found.call_count]:
            self.calls[read.call].read(read.frame_bytes, read.message_bytes)
        for count in found.queues[: found.queue_count]:
            self._queues[count.queue].accepted(count)

    def leave(self, call: Any) -> list[FastSequence]:
        """Ends a call, by the library's handle. Returns the sequence of each of its steps without an answer."""
        found = POINTER(c_uint64)()
        count = self.library.close_call(call, byref(found))
        return [self._sequences[number] for number in found[:count]]

    # --- batches ------------------------------------------------------------------------------------------------------

    def finish(self, batch: FastBatch) -> None:
        """Sends the answers of a batch, and goes on with the sequences."""
        self.count_read()
        found, queue = FinishedBatch(), batch.queue
        self.library.finish(batch.handle, time.monotonic(), byref(found))
        failures = [(each.call, each.place, each.sequence, each.step) for each in found.failures[: found.failed_count]]
        rested, gone = found.rested[: found.rested_count], found.gone[: found.gone_count]
        queue.finished(found, batch.timing)
        if found.answered.steps:
            self.count(queue.owner.name, queue.owner.version, int(found.answered.steps))
        for place in range(found.call_count):
            answers = found.calls[place]
            self.calls[answers.call].send(answers)
        for call, place, number, step in failures:
            self._failed(call, place, number, batch.errors[step])
        for number in gone:
            self._sequences.pop(number)
        for number in rested:
            sequence = self._sequences.pop(number)
            sequence.lender.rested(sequence.sequence)

    def _failed(self, call: int, place: int, number: int, error: ServeError) -> None:
        sequence = self._sequences.get(number)
        if sequence is None:
            return
        if call in self.calls:
            sequence.queue.owner.counted.failed(error.reason)
            self.calls[call].failed(place, sequence, error)
        sequence.lender.step_failed(sequence.sequence, error)

    def take_back(self, sequence: FastSequence) -> bool:
        """See `FastSequence.take_back`."""
        if self.library.leave_sequence(sequence.handle):
            return True
        del self._sequences[sequence.number]
        return False

    def close(self, sequence: FastSequence, error: SequenceError) -> None:
        """See `FastSequence.close`."""
        self.count_read()
        found = Dropped()
        self.library.close_sequence(sequence.handle, byref(found))
        places = [(each.call, each.place) for each in found.places[: found.count]]
        if found.gone:
            del self._sequences[sequence.number]
        if found.queued.steps:
            sequence.queue.dropped(found.queued)
        for call, place in places:
            sequence.queue.owner.counted.failed(error.reason)
            self.calls[call].failed(place, sequence, error)

    def note_used(self) -> None:
        """Tells the lenders which sequences had steps since this was called last, in the order in which they had."""
        found, when = POINTER(c_uint64)(), POINTER(c_double)()
        count = self.library.used(self._handle, byref(found), byref(when))
        for number, moment in zip(found[:count], when[:count]):
            sequence = self._sequences.get(number)
            if sequence is not None:
                sequence.lender.used(sequence.sequence, moment)
