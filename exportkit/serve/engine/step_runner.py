"""Runs the steps of sequences, each in its session, on the replica that began it; together where rows allow it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import torch

from exportkit.errors import ExportkitError, ModelClosedError
from exportkit.runtime.requests import joined
from exportkit.serve.engine.checked_request import CheckedRequest, Outcome
from exportkit.serve.engine.held_session import AGAIN, ENDED, HeldSession
from exportkit.serve.engine.joined_steps import JoinedSteps
from exportkit.serve.engine.model_description import ModelDescription
from exportkit.serve.engine.model_replica import ModelReplica, arguments_of, tensors_in
from exportkit.serve.engine.runners import BatchRunner
from exportkit.serve.engine.statistics import Statistics
from exportkit.serve.engine.warm_up import recorded_sequence
from exportkit.serve.statuses import SequenceError, ServeError

_log = logging.getLogger(__name__)

_Flat = list[torch.Tensor]


class StepRunner(BatchRunner):
    """Runs steps of a method with state. `waited` stays 0."""

    def __init__(
        self, replica: ModelReplica, described: ModelDescription, counted: Statistics, *, warm_up: bool
    ) -> None:
        """See BatchRunner."""
        super().__init__(replica, described, counted, warm_up=warm_up)
        method, rows = replica.model.manifest.method(self._method), described.batching.dimension
        self._arguments = arguments_of(method.call)
        self._joined = None if rows is None else JoinedSteps(method, rows.name)

    def _warm_up(self) -> None:
        model = self._replica.model
        if (case := recorded_sequence(model, self._method)) is not None:
            with self._replica.slot(), model.session(**case.state_sizes) as session:
                for call in case.calls:
                    session.methods[call.method](*call.args, **call.kwargs)

    def run(self, requests: Sequence[CheckedRequest], taken: float) -> list[Outcome]:
        """Runs steps of different sequences. If they fail together, no state was changed, and each runs alone."""
        going = [step for step in requests if not _session_of(step).closed]  # others would fail together
        if self._joined is not None and len(going) > 1:
            try:
                with self._replica.slot():
                    ran = dict(zip(going, self._together(self._joined, going, taken)))
                return [ran.get(step) or self._alone(step, taken) for step in requests]
            except ExportkitError as error:
                _log.warning("%d steps failed together, and run one by one: %s", len(going), error.message)
        return [self._alone(step, taken) for step in requests]

    def _together(self, together: JoinedSteps, steps: Sequence[CheckedRequest], taken: float) -> list[Outcome]:
        """Runs steps in one call. What it raises was raised before any state was changed, or the device is broken."""

        def run(inputs: _Flat) -> _Flat:
            outputs = together.run(model, sessions, inputs)
            if self._replica.device.type == "cuda":
                torch.cuda.current_stream(self._replica.device).synchronize()
            return outputs

        model = self._replica.model
        sessions = [_session_of(step).open(model) for step in steps]
        return self._timed(steps, taken, run)

    def _alone(self, step: CheckedRequest, taken: float) -> Outcome:
        """Runs a step. None runs twice: the state may be half written."""

        def run(inputs: _Flat) -> _Flat:
            args, kwargs = self._arguments(inputs)
            outputs = tensors_in(session.methods[self._method](*args, **kwargs))
            session.synchronize()
            return outputs

        held = _session_of(step)
        try:
            with self._replica.slot():
                session = held.open(self._replica.model)
                (answer,) = self._timed([step], taken, run)
                return answer
        except ServeError as error:
            return error
        except ModelClosedError:  # another runner found out
            return SequenceError("the sequence ended: the process with its state died", hint=AGAIN)
        except Exception as error:
            if held.closed:  # meanwhile, so that the state was gone
                return SequenceError(ENDED, hint=AGAIN)
            return self._failure_of(error)

    def _timed(self, steps: Sequence[CheckedRequest], taken: float, run: Callable[[_Flat], _Flat]) -> list[Outcome]:
        """Brings the inputs of steps to the device, runs them, and brings the outputs back."""
        began = time.perf_counter()
        inputs = [tensor.to(self._replica.device) for tensor in joined([step.inputs for step in steps])]
        moved = time.perf_counter()
        found = run(inputs)
        ran = time.perf_counter()
        wanted = {place for step in steps for place in step.outputs}
        outputs = {place: found[place].cpu().contiguous() for place in wanted}
        return self._answers(steps, taken, outputs, (moved - began, ran - moved, time.perf_counter() - ran))


def _session_of(step: CheckedRequest) -> HeldSession:
    assert step.session is not None
    return step.session
