"""Short runs, in threads without Python: a runner's thread would wait for Python's lock before and after each."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from exportkit.runtime.background import Background
from exportkit.runtime.requests import Answers
from exportkit.serve.batching.batcher import Batch
from exportkit.serve.engine.execution import BatchResult, BatchRunner, failure_of, outputs_of, runner_failed
from exportkit.serve.engine.queued_request import QueuedRequest
from exportkit.serve.statuses import ServeError


class EndedBatch(NamedTuple):
    """A batch that has run, the answers to its requests, and the seconds that it ran."""

    batch: Batch[QueuedRequest]
    answers: Sequence[BatchResult | ServeError]
    seconds: float


@dataclass(eq=False)
class _Batch:
    """A batch that runs, and its answers by the places of its requests."""

    batch: Batch[QueuedRequest]
    answers: dict[int, BatchResult | ServeError] = field(default_factory=dict)
    seconds: float = 0.0


class ShortRuns:
    """Runs batches on a copy of a model in this process. All methods but `join` are for the event loop's thread."""

    def __init__(self, runner: BatchRunner, background: Background, told: Callable[[], None]) -> None:
        """Begins. `told` is called when `ended` may have something to return."""
        self._runner = runner
        self._background = background
        self._told = told
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(background.descriptor, told)
        self._runs: dict[int, tuple[_Batch, Sequence[int]]] = {}
        self._refused: list[tuple[_Batch, Sequence[int], Exception]] = []

    def begin(self, batch: Batch[QueuedRequest]) -> None:
        """Runs a batch."""
        self._run(_Batch(batch), range(len(batch.tickets)))

    def ended(self) -> list[EndedBatch]:
        """Returns the batches that ended since the last call."""
        refused, self._refused = self._refused, []
        outcomes = [(*self._runs.pop(number), ran) for number, ran in self._background.ended()]
        found = []
        for whole, places, ran in [*outcomes, *refused]:
            if not isinstance(ran, Answers) and len(places) > 1:  # only the bad one is to fail
                for place in places:
                    self._run(whole, [place])
                continue
            whole.answers.update(zip(places, self._answers(whole, places, ran)))
            if len(whole.answers) == len(whole.batch.tickets):
                answers = [whole.answers[place] for place in range(len(whole.answers))]
                found.append(EndedBatch(whole.batch, answers, whole.seconds))
        return found

    def join(self) -> None:
        """Waits in another thread until what began has run."""
        self._background.finish()
        with contextlib.suppress(RuntimeError):  # the loop was closed, so nobody waits
            self._loop.call_soon_threadsafe(self._close)

    def _close(self) -> None:
        self._loop.remove_reader(self._background.descriptor)
        self._told()

    def _run(self, whole: _Batch, places: Sequence[int]) -> None:
        requests = [whole.batch.tickets[place].payload.request for place in places]
        try:
            number = self._background.begin(
                [request.inputs for request in requests], outputs_of(requests), self._runner.copy.method.name
            )
        except Exception as error:
            self._refused.append((whole, places, error))
            self._loop.call_soon(self._told)
        else:
            self._runs[number] = whole, places

    def _answers(
        self, whole: _Batch, places: Sequence[int], ran: Answers | Exception
    ) -> Sequence[BatchResult | ServeError]:
        if not isinstance(ran, Answers):
            return [failure_of(self._runner.copy, ran)]
        whole.seconds += ran.input_seconds + ran.run_seconds + ran.output_seconds
        tickets = [whole.batch.tickets[place] for place in places]
        waited = [whole.batch.taken - ticket.arrived for ticket in tickets]
        try:
            return self._runner.results([ticket.payload.request for ticket in tickets], waited, ran)
        except Exception as error:
            return runner_failed(error, len(places))
