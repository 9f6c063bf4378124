"""The methods and the sessions of a package that runs in a worker process."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from functools import partial

import torch

from exportkit.runtime.isolated_messages import AccessState, Capture, MakeSession, ReportGraphs, Run
from exportkit.runtime.isolated_process import Requests, Worker
from exportkit.runtime.methods import MethodPlan, ModelCode
from exportkit.runtime.requests import Answers
from exportkit.runtime.runner import Runner
from exportkit.sizes import sizes_of


class WorkerRunner(Runner):
    """The compiled code of a method in a worker process, which looks at every call before it answers."""

    def __init__(self, worker: Worker, plan: MethodPlan) -> None:
        """Runs a method of the worker's package."""
        self._worker = worker
        self._plan = plan

    def run(self, inputs: list[torch.Tensor], /) -> list[torch.Tensor]:
        """Returns the flat outputs for flat, valid inputs of a method without state. Raises the errors of `ask`."""
        return run_in_worker(self._worker, self._plan, None, inputs)

    def run_requests(self, requests: Requests, outputs: Sequence[int], /) -> Answers:
        """See `Runner.run_requests`."""
        return self._worker.run_requests(self._plan.name, requests, outputs)

    def capture(self, arguments: list[torch.Tensor], own: int, /) -> list[torch.Tensor] | None:
        """See `Runner.capture`. The graph's own inputs are the worker's, and a call with any inputs copies to them."""
        sizes = sizes_of(self._plan.described, [tensor.shape for tensor in arguments])
        answer, _ = self._worker.ask(Capture(self._plan.name, sizes), arguments[:own])
        return arguments[:own] if answer.graphs else None

    def graph_report(self) -> str | None:
        """See `Runner.graph_report`."""
        return self._worker.ask(ReportGraphs(self._plan.name), [])[0].report


class WorkerState:
    """State in a worker process. One caller at a time may use it."""

    def __init__(self, code: ModelCode, worker: Worker, number: int) -> None:
        """Takes over a session of the worker. The worker frees it once this object is gone."""
        self._code = code
        self._worker = worker
        self._number = number
        self._names = [each.name for each in code.manifest.state]
        self._end = weakref.finalize(self, worker.ended_sessions.append, number)
        self._end.atexit = False

    @classmethod
    def new(cls, code: ModelCode, worker: Worker, sizes: Mapping[str, int]) -> WorkerState:
        """Makes the state of a new session."""
        answer, _ = worker.ask(MakeSession(dict(sizes)), [])
        return cls(code, worker, answer.session)

    @property
    def alive(self) -> bool:
        """Whether the worker lives, and has the state."""
        return self._end.alive and self._worker.alive

    def check(self, plan: MethodPlan, inputs: Sequence[torch.Tensor], /) -> None:
        """Nothing here shares memory with the worker's state."""

    def run(self, plan: MethodPlan, inputs: list[torch.Tensor], /) -> list[torch.Tensor]:
        """See `State.run`."""
        return self._code.run(plan, partial(run_in_worker, self._worker, plan, self._number), inputs)

    def refused(self, /) -> None:
        """The worker looks at every call before it answers."""

    def fork(self, /) -> WorkerState:
        """See `State.fork`."""
        answer, _ = self._worker.ask(MakeSession({}, copy_of=self._number), [])
        return WorkerState(self._code, self._worker, answer.session)

    def reset(self, /) -> None:
        """See `State.reset`."""
        self._worker.ask(AccessState(self._number, "reset"), [])

    def tensors(self, /) -> dict[str, torch.Tensor]:
        """See `State.tensors`. They are copies."""
        return dict(zip(self._names, self._worker.ask(AccessState(self._number, "read"), [])[1]))

    def replace(self, tensors: Mapping[str, torch.Tensor], /) -> None:
        """See `State.replace`."""
        self._worker.ask(AccessState(self._number, "write"), [tensors[name] for name in self._names])

    def close(self, /) -> None:
        """See `State.close`."""
        self._end()
        self._worker.close_sessions()


def run_in_worker(
    worker: Worker, plan: MethodPlan, session: int | None, inputs: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Runs a method in the worker, and copies what it wrote into the inputs."""
    _, received = worker.ask(Run(plan.name, session), inputs)
    places = plan.inputs.written
    outputs, written = received[: len(received) - len(places)], received[len(received) - len(places) :]
    with torch.no_grad():
        for place, tensor in zip(places, written):
            inputs[place].copy_(tensor)
    return outputs
