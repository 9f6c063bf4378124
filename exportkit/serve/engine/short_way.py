"""Answers steps whose requests are known by others like them, without a task for each."""

from __future__ import annotations

from collections.abc import Sequence

from exportkit.serve.engine.accepted import AcceptedRequests, WaitingStep
from exportkit.serve.engine.checked_request import RequestForm
from exportkit.serve.engine.counted_steps import CountedStep, QueuedSteps
from exportkit.serve.engine.dispatcher import Dispatcher
from exportkit.serve.engine.home import Home
from exportkit.serve.engine.model_description import DEFAULT_PRIORITY
from exportkit.serve.engine.pending_steps import OneSequence
from exportkit.serve.engine.queued_request import Answered
from exportkit.serve.engine.sequence_rules import key_of
from exportkit.serve.engine.served_sequences import ServedSequences
from exportkit.serve.engine.statistics import Statistics
from exportkit.serve.protocol.inference import SequenceStep
from exportkit.serve.statuses import ServeError


class ShortWay:
    """The steps of a model with state."""

    def __init__(
        self,
        sequences: ServedSequences,
        home: Home,
        dispatchers: Sequence[Dispatcher],
        accepted: AcceptedRequests,
        counted: Statistics,
    ) -> None:
        """Has the package's sequences, the load, and what each step is counted by."""
        self._sequences, self._home = sequences, home
        self._dispatchers = dispatchers
        self._accepted, self._counted = accepted, counted
        self._queued = QueuedSteps(dispatchers, DEFAULT_PRIORITY)

    def going_on(self, step: SequenceStep, form: RequestForm) -> OneSequence | None:
        """Returns the sequence that takes the step, if it runs on this load."""
        return self._sequences.going_on(key_of(step), self._home, form.sizes)

    def go_on(
        self,
        sequence: OneSequence,
        form: RequestForm,
        data: Sequence[memoryview],
        answered: Answered,
        *,
        priority: int,
        last: bool,
    ) -> CountedStep:
        """Answers a step of a sequence of `going_on`."""
        counted = CountedStep(self._accepted, self._counted, form.size, answered)
        run = self._queued
        if priority or sequence.busy:
            waiting = counted.waiting = WaitingStep(self._counted, form) if sequence.busy else None
            run = QueuedSteps(self._dispatchers, priority or DEFAULT_PRIORITY, waiting)
        chosen = _in_order(form, data)
        counted.step = self._sequences.continue_step(sequence, form, chosen, run, last=last, answered=counted)
        return counted

    def begin(
        self, step: SequenceStep, form: RequestForm, data: Sequence[memoryview], answered: Answered, *, priority: int
    ) -> CountedStep:
        """Answers a step that begins a sequence. Raises what `ServedSequences.begin_step` raises."""
        counted = CountedStep(self._accepted, self._counted, form.size, answered)
        run = self._queued if not priority else QueuedSteps(self._dispatchers, priority)
        try:
            counted.step = self._sequences.begin_step(
                step, self._home, form, form.sizes, run, None, counted, _in_order(form, data)
            )
        except ServeError as error:
            counted.refused(error)
            raise
        return counted


def _in_order(form: RequestForm, data: Sequence[memoryview]) -> Sequence[memoryview]:
    return data if len(data) == 1 else [data[place] for place in form.places]
