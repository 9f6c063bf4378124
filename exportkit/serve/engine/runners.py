"""Runs batches of requests, or of steps of sequences, on one replica of a model: what one runner does."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

import torch

from exportkit.errors import ExportkitError, ModelClosedError, RefusedValueError
from exportkit.runtime.requests import Answers, run_in_steps
from exportkit.serve.engine.checked_request import CheckedRequest, Outcome, bytes_of, datatypes
from exportkit.serve.engine.held_session import AGAIN, ENDED, HeldSession
from exportkit.serve.engine.model_description import ModelDescription
from exportkit.serve.engine.model_replica import ModelReplica, WorkerLostError, arguments_of, tensors_in
from exportkit.serve.engine.statistics import Statistics
from exportkit.serve.engine.warm_up import flat_inputs, recorded_sequence
from exportkit.serve.protocol.inference import InferAnswer, InferTiming, OutputTensor
from exportkit.serve.statuses import BackendError, BadRequestError, NotReadyError, SequenceError, ServeError

_log = logging.getLogger(__name__)

_Requests = Sequence[CheckedRequest]


class BatchRunner(ABC):
    """Runs batches on one replica. Only one thread uses it.

    Attributes:
        waited: The seconds that the last batch waited for other runners, with its inputs ready.
    """

    def __init__(
        self, replica: ModelReplica, described: ModelDescription, counted: Statistics, *, warm_up: bool
    ) -> None:
        """Prepares the way to the replica's device, in the thread that will use it.

        Args:
            replica: The replica, which other runners may call as well.
            described: The model.
            counted: Counts the batches.
            warm_up: Runs a recorded case: libraries of CUDA and OpenMP prepare themselves in each thread anew.
        """
        self.waited = 0.0
        self._replica = replica
        self._described = described
        self._method = described.method
        outputs = described.call.outputs
        self._outputs = list(zip([output.name for output in outputs], datatypes(outputs)))
        self._counted = counted
        replica.model.use_own_stream()
        if warm_up:
            self._warm_up()

    @abstractmethod
    def _warm_up(self) -> None:
        """Runs a recorded case."""

    @abstractmethod
    def run(self, requests: _Requests, taken: float) -> list[Outcome]:
        """Returns for each request its answer, or why there is none.

        Args:
            requests: Requests of one shape.
            taken: The time at which they left the queue.
        """

    def _answers(self, requests: _Requests, taken: float, call: Callable[[Sequence[int]], Answers]) -> list[Outcome]:
        """Runs requests in one call, which gets the outputs that are wanted, and gives each its rows of the answers."""
        wanted = sorted({place for request in requests for place in request.outputs})
        ran = call(wanted)
        self.waited = ran.wait_seconds
        spent = (ran.input_seconds, ran.run_seconds, ran.output_seconds)
        rows = sum(request.rows for request in requests)
        self._counted.executed(rows, compute_input=spent[0], compute_infer=spent[1], compute_output=spent[2])
        sizes = [request.inputs[0].shape[0] for request in requests] if len(requests) > 1 else None
        parts = {place: _parts_of(*self._outputs[place], out, sizes) for place, out in zip(wanted, ran.outputs)}
        name, version = self._described.name, self._described.version
        return [
            InferAnswer(
                name,
                version,
                request.id,
                tuple([parts[place][number] for place in request.outputs]),
                InferTiming(taken - request.arrived + self.waited, *spent, rows),
            )
            for number, request in enumerate(requests)
        ]

    def _failure_of(self, error: Exception) -> ServeError:
        """Returns the answer to a request on which the replica failed when it ran alone."""
        if isinstance(error, RefusedValueError):
            return BadRequestError(error.message, hint=error.hint)
        if self._replica.lost is not None:  # by another runner's request
            return NotReadyError(self._replica.lost)
        self._replica.check_health(self._method)
        if isinstance(error, ExportkitError):
            return BackendError(error.message, hint=error.hint)
        _log.error("the model failed", exc_info=error)
        return BackendError(f"the model failed: {type(error).__name__}: {str(error).partition(chr(10))[0]}")


class RequestRunner(BatchRunner):
    """Runs requests of a method without state."""

    def _warm_up(self) -> None:
        if (recorded := next(self._replica.recorded(self._method), None)) is not None:
            inputs = [tensor.cpu().contiguous() for tensor in flat_inputs(self._described.call, recorded)]
            with self._replica.slot():
                self._call([inputs], range(len(self._outputs)))

    def run(self, requests: _Requests, taken: float) -> list[Outcome]:
        """Runs requests together. If that fails, each runs once more alone, so that only the bad one fails."""
        lost, self.waited = False, 0.0
        try:
            with self._replica.slot():
                return self._together(requests, taken)
        except Exception as error:
            # If the worker process died, another runner's batch may have killed it, so even one request runs again.
            lost = isinstance(error, WorkerLostError)
            if len(requests) == 1 and not lost:
                return [self._failure_of(error)]
        return [self._retry_alone(request, taken, lost=lost) for request in requests]

    def _retry_alone(self, request: CheckedRequest, taken: float, *, lost: bool) -> Outcome:
        """Runs a request by itself, and while no other runner runs if the worker process was lost."""
        with self._replica.slot(exclusive=lost):
            if not self._replica.alive and not self._replica.restore():
                return NotReadyError(self._replica.failure or "the model was closed")
            try:
                (answer,) = self._together([request], taken)
            except Exception as error:
                return self._failure_of(error)
            return answer

    def _together(self, requests: _Requests, taken: float) -> list[Outcome]:
        """Runs requests in one call. Raises what the model raises."""
        return self._answers(requests, taken, partial(self._call, [request.inputs for request in requests]))

    def _call(self, inputs: Sequence[Sequence[torch.Tensor]], outputs: Sequence[int]) -> Answers:
        return self._replica.answered(lambda model: model.run_requests(inputs, outputs, self._method))


def _parts_of(name: str, datatype: str, output: torch.Tensor, sizes: list[int] | None) -> list[OutputTensor]:
    """Returns each request's rows of an output; `sizes` None: there is one request, and all is its.

    Memory is sliced, not tensors: at each operation of torch, this thread would wait for the interpreter's lock.
    """
    shape, data = tuple(output.shape), bytes_of(output)
    if sizes is None:
        return [OutputTensor(name, datatype, shape, data)]
    width = data.nbytes // shape[0]
    return [
        OutputTensor(name, datatype, (size, *shape[1:]), data[(end - size) * width : end * width])
        for size, end in zip(sizes, accumulate(sizes))
    ]


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
