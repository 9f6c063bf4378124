"""Runs the steps of sequences, each in its session, on the replica that began it; together where rows allow it."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from exportkit.errors import ExportkitError, ModelClosedError
from exportkit.runtime.requests import run_in_steps
from exportkit.serve.engine.checked_request import CheckedRequest, Outcome
from exportkit.serve.engine.held_session import AGAIN, ENDED, HeldSession
from exportkit.serve.engine.model_description import ModelDescription
from exportkit.serve.engine.model_replica import ModelReplica, arguments_of, tensors_in
from exportkit.serve.engine.runners import BatchRunner
from exportkit.serve.engine.statistics import Statistics
from exportkit.serve.engine.warm_up import recorded_sequence
from exportkit.serve.statuses import SequenceError, ServeError

_log = logging.getLogger(__name__)


class StepRunner(BatchRunner):
    """Runs steps of a method with state."""

    def __init__(
        self, replica: ModelReplica, described: ModelDescription, counted: Statistics, *, warm_up: bool
    ) -> None:
        """See BatchRunner."""
        super().__init__(replica, described, counted, warm_up=warm_up)
        self._arguments = arguments_of(described.call)

    def _warm_up(self) -> None:
        model = self._replica.model
        if (case := recorded_sequence(model, self._method)) is not None:
            with self._replica.slot(), model.session(**case.state_sizes) as session:
                for call in case.calls:
                    session.methods[call.method](*call.args, **call.kwargs)

    def run(self, requests: Sequence[CheckedRequest], taken: float) -> list[Outcome]:
        """Runs steps of different sequences. If they fail together, no state was changed, and each runs alone."""
        going = [step for step in requests if not _session_of(step).closed]  # others would fail together
        if len(going) > 1:
            try:
                with self._replica.slot():
                    ran = dict(zip(going, self._together(going, taken)))
                return [ran.get(step) or self._alone(step, taken) for step in requests]
            except ExportkitError as error:
                _log.warning("%d steps failed together, and run one by one: %s", len(going), error.message)
        return [self._alone(step, taken) for step in requests]

    def _together(self, steps: Sequence[CheckedRequest], taken: float) -> list[Outcome]:
        """Runs steps in one call. What it raises was raised before any state was changed, or the device is broken."""
        model = self._replica.model
        given = [(_session_of(step).open(model), step.inputs) for step in steps]
        return self._answers(steps, taken, lambda wanted: model.run_steps(given, wanted, self._method))

    def _alone(self, step: CheckedRequest, taken: float) -> Outcome:
        """Runs a step. None runs twice: the state may be half written."""

        def run(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
            args, kwargs = self._arguments(inputs)
            outputs = tensors_in(session.methods[self._method](*args, **kwargs))
            session.synchronize()
            return outputs

        held = _session_of(step)
        try:
            with self._replica.slot():
                session = held.open(self._replica.model)
                device, given = self._replica.device, [step.inputs]
                (answer,) = self._answers([step], taken, lambda wanted: run_in_steps(run, device, given, wanted))
                return answer
        except ServeError as error:
            return error
        except ModelClosedError:  # another runner found out
            return SequenceError("the sequence ended: the process with its state died", hint=AGAIN)
        except Exception as error:
            if held.closed:  # meanwhile, so that the state was gone
                return SequenceError(ENDED, hint=AGAIN)
            return self._failure_of(error)


def _session_of(step: CheckedRequest) -> HeldSession:
    assert step.session is not None
    return step.session
