"""Plain steps that wait for one copy of a model, in the library of csrc/steps."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from ctypes import byref
from dataclasses import dataclass, field
from typing import Any

import torch

from exportkit.serve.batching.tickets import BatchLimits
from exportkit.serve.engine.accepted import AcceptedRequests
from exportkit.serve.engine.statistics import Statistics
from exportkit.serve.engine.step_library import FinishedBatch, StepCount, StepLibrary, Taken, numbers, pointers
from exportkit.serve.protocol.inference import InferTiming
from exportkit.serve.statuses import ServeError


@dataclass(frozen=True, eq=False)
class FastForm:
    """What the steps of a queue have in common.

    Attributes:
        inputs: The shape of a row of each input of the model.
        dtypes: Their dtypes.
        state: The bytes of a row of each tensor of the state.
        read, written: Which of them the method reads, and writes.
        outputs: The places of the outputs that are wanted.
        most_rows: The most rows of a batch.
    """

    inputs: Sequence[Sequence[int]]
    dtypes: Sequence[torch.dtype]
    state: Sequence[int]
    read: Sequence[int]
    written: Sequence[int]
    outputs: Sequence[int]
    most_rows: int


@dataclass(frozen=True, eq=False)
class Owner:
    """The served model of a queue, and what it counts."""

    name: str
    version: str
    counted: Statistics
    accepted: AcceptedRequests
    limits: BatchLimits


class FastBatch:
    """Steps that run together.

    Attributes:
        queue: Where they waited.
        steps: Their number.
        timing: Where their time went; of each, but for the time in the queue.
        errors: Why a step has no answer, by its place.
    """

    def __init__(self, queue: FastQueue, library: StepLibrary, taken: Taken) -> None:
        """Was taken out of the queue."""
        self.queue = queue
        self.handle = taken.batch
        self.steps, self.rows = int(taken.count.steps), int(taken.count.rows)
        self.timing = InferTiming(0.0, 0.0, 0.0, 0.0, self.rows)
        self.errors: dict[int, ServeError] = {}
        self._library = library

    def rows_of(self, first: int, end: int) -> int:
        """Returns the rows of some steps."""
        if end - first == self.steps:
            return self.rows
        return int(self._library.rows(self.handle, first, end))

    def gather(self, first: int, end: int, inputs: Any, state: Any) -> None:
        """Copies the inputs and the state of some steps to these pointers. Python's lock is not held."""
        self._library.gather(self.handle, first, end, inputs, state)

    def scatter(self, first: int, end: int, state: Any) -> None:
        """Copies their new state back."""
        self._library.scatter(self.handle, first, end, state)

    def answer(self, first: int, end: int, outputs: Any) -> None:
        """Makes their answers. Raises RuntimeError if it is not known how."""
        if self._library.answer(self.handle, first, end, outputs):
            raise RuntimeError("a step with other rows was queued than those whose answers are known")

    def fail(self, place: int, error: ServeError) -> None:
        """A step has no answer."""
        self.errors[place] = error
        self._library.fail(self.handle, place)


@dataclass
class FastMemory:
    """Where a runner brings batches together. It grows, and is used again.

    Attributes:
        rows: For how many there is room.
        calls: What runs so many rows.
    """

    rows: int = 0
    inputs: list[torch.Tensor] = field(default_factory=list)
    state: list[torch.Tensor] = field(default_factory=list)
    input_pointers: Any = None
    state_pointers: Any = None
    calls: dict[int, Callable[[], list[torch.Tensor]]] = field(default_factory=dict)

    def grow(self, rows: int, form: FastForm, new_state: Callable[[int], list[torch.Tensor]]) -> None:
        """Makes room for so many rows."""
        if rows <= self.rows:
            return
        self.rows = min(1 << (rows - 1).bit_length(), max(rows, form.most_rows))
        self.inputs = [torch.empty((self.rows, *shape), dtype=dtype) for shape, dtype in zip(form.inputs, form.dtypes)]
        self.state = new_state(self.rows)
        self.input_pointers = pointers([tensor.data_ptr() for tensor in self.inputs])
        self.state_pointers = pointers([tensor.data_ptr() for tensor in self.state])
        self.calls.clear()


class FastQueue:
    """The plain steps that wait for one copy. What a step is counted for, is counted for all of a read or a batch.

    Attributes:
        number: Its own among all.
        handle: The library's.
        form: What its steps have in common.
        owner: Who answers them.
    """

    def __init__(self, library: StepLibrary, steps: Any, number: int, owner: Owner, form: FastForm) -> None:
        """Nothing waits. `steps` is the library's server."""
        self.number = number
        self.form = form
        self.owner = owner
        self._library = library
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in zip(form.inputs, form.dtypes)]
        used = [bytes(place in chosen for place in range(len(form.state))) for chosen in (form.read, form.written)]
        self.handle = library.open_queue(
            steps,
            number,
            owner.limits.max_delay,
            form.most_rows,
            numbers(sizes),
            len(sizes),
            numbers(list(form.state)),
            *used,
            len(form.state),
        )
        self._room = library.queue_bytes(self.handle).contents
        self._known: set[int] = set()
        self._bytes_a_row: list[int] | None = None  # of each output
        weakref.finalize(self, library.close_queue, self.handle).atexit = False
        self.told: Callable[[FastQueue], None] = lambda _: None

    def learn_answer(self, rows: int, described: tuple[bytes, bytes], sizes: Sequence[int]) -> bool:
        """Learns how steps of so many rows are answered. Returns whether they can be."""
        bytes_a_row = [size // rows for size in sizes]
        if self._bytes_a_row not in (None, bytes_a_row):
            return False
        self._bytes_a_row = bytes_a_row
        if rows not in self._known:
            before, behind = described
            found = self._library.set_answer(
                self.handle, rows, before, len(before), behind, len(behind), numbers(list(sizes)), len(sizes)
            )
            if found:
                return False
            self._known.add(rows)
        return True

    def check_outputs(self, rows: int, sizes: Sequence[int]) -> None:
        """Raises RuntimeError if outputs do not have the bytes that the library will read."""
        wanted = [rows * each for each in self._bytes_a_row or []]
        if wanted != list(sizes):
            raise RuntimeError(f"the model's outputs have {list(sizes)} bytes, and so far {wanted} for {rows} rows")

    def make_room(self) -> None:
        """Says what may be accepted now."""
        self._room.value = self.owner.limits.max_queued_bytes - self.owner.accepted.bytes

    def accepted(self, count: StepCount) -> None:
        """Steps came."""
        self.owner.accepted.enter(count.bytes, count.steps)
        self.owner.counted.entered(count.rows, count.bytes, count.steps)
        self.told(self)

    def dropped(self, count: StepCount) -> None:
        """Steps will not run."""
        self.owner.accepted.leave(count.bytes, count.steps)
        self.owner.counted.left(count.rows, count.bytes, count.steps)

    def finished(self, found: FinishedBatch, timing: InferTiming) -> None:
        """Steps ran."""
        owner = self.owner
        for count in (found.answered, found.failed, found.unwanted):
            if count.steps:
                owner.accepted.leave(count.bytes, count.steps)
        if found.answered.steps:
            owner.counted.succeeded_together(
                int(found.answered.steps), timing, found.waited, found.seconds, list(found.bounds)
            )
        if found.next.steps:
            self.told(self)

    # --- of any thread ------------------------------------------------------------------------------------------------

    def due(self) -> float:
        """Returns when the next batch may run, by `time.monotonic()`; 0: at once."""
        return float(self._library.due(self.handle))

    def take(self, now: float) -> FastBatch | None:
        """Takes a batch that may run now."""
        taken = Taken()
        self._library.take(self.handle, self.form.most_rows, now, byref(taken))
        if not taken.batch:
            return None
        count = taken.count
        self.owner.counted.left(count.rows, count.bytes, count.steps)
        return FastBatch(self, self._library, taken)
