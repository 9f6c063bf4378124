"""Which sequences of a served model are lent to the library, and in which of its queues their steps wait."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from exportkit.package.dtypes import ITEM_BYTES
from exportkit.package.manifest import Manifest, PackagedMethod, Size
from exportkit.serve.engine.checked_request import RequestForm
from exportkit.serve.engine.dispatcher import Dispatcher
from exportkit.serve.engine.fast_queue import FastForm, FastQueue, Owner
from exportkit.serve.engine.fast_steps import FastSteps
from exportkit.serve.engine.home import Home
from exportkit.serve.engine.sequence_rules import SequenceKey
from exportkit.serve.engine.served_sequences import ServedSequences

_MOST_QUEUES = 8  # of a model: each is a batch of its own


@dataclass(frozen=True, eq=False)
class KnownAnswer:
    """How a step that was answered was.

    Attributes:
        number: The library's, of the form of its request.
        form: The same for the model.
        described: What stands before and behind the id in its answer.
        sizes: The bytes of its outputs.
    """

    number: int
    form: RequestForm
    described: tuple[bytes, bytes]
    sizes: Sequence[int]


class Lending:
    """The queues of a served model with state in blocks, on the CPU."""

    def __init__(
        self,
        owner: Owner,
        manifest: Manifest,
        method: PackagedMethod,
        dispatchers: Sequence[Dispatcher],
        most_rows: int,
    ) -> None:
        """There are none yet. `dispatchers` are those of the copies."""
        self._owner = owner
        self._manifest = manifest
        self._method = method
        self._dispatchers = dispatchers
        self._most_rows = most_rows
        self._queues: dict[tuple[object, ...], FastQueue] = {}
        self._steps: FastSteps | None = None

    def lend(
        self, steps: FastSteps, key: SequenceKey, sequences: ServedSequences, home: Home, known: KnownAnswer
    ) -> None:
        """Lends a sequence that rests, if its steps can take the way through the library."""
        copy = sequences.copy_of(key)
        queue = None if copy is None else self._queue(steps, copy, known.form)
        if queue is not None and queue.learn_answer(known.form.rows, known.described, known.sizes):
            sequences.lend(steps, key, home, queue, known.number)

    def _queue(self, steps: FastSteps, copy: int, form: RequestForm) -> FastQueue | None:
        kind = (copy, form.bucket, tuple(form.outputs))
        found = self._queues.get(kind)
        if found is None and len(self._queues) < _MOST_QUEUES and form.rows <= self._most_rows:
            self._steps = steps
            found = self._queues[kind] = steps.open_queue(self._owner, self._form(form))
            self._dispatchers[copy].add_queue(found, steps.finish)
        return found

    def _form(self, form: RequestForm) -> FastForm:
        assert isinstance(form.bucket, tuple)
        uses, state = self._method.state, self._manifest.state
        return FastForm(
            form.bucket,
            [getattr(torch, each.dtype) for each in self._method.call.inputs],
            [
                math.prod(n for n in each.shape[1:] if not isinstance(n, Size)) * ITEM_BYTES[each.dtype]
                for each in state
            ],
            [use.index for use in uses],
            [use.index for use in uses if use.written],
            form.outputs,
            self._most_rows,
        )

    def close(self) -> None:
        """Forgets the queues, in which nothing waits."""
        if self._steps is not None:
            for queue in self._queues.values():
                queue.told = lambda _: None  # or it would keep the dispatcher, which keeps it
                self._steps.close_queue(queue)
        self._queues.clear()
