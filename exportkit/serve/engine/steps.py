"""Runs the steps of sequences, each in its session, on the copy of the model that began it."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from exportkit.package.manifest import TensorOutput
from exportkit.runtime.model import Model
from exportkit.runtime.session import Session
from exportkit.serve.engine.checked_request import CheckedRequest, arguments_of, bytes_of, datatypes
from exportkit.serve.engine.execution import BatchResult, failure_of
from exportkit.serve.engine.model_copy import ModelCopy, tensors_in
from exportkit.serve.engine.statistics import Statistics
from exportkit.serve.engine.warm_up import recorded_sequence
from exportkit.serve.protocol.inference import InferTiming, OutputTensor
from exportkit.serve.statuses import SequenceError, ServeError


class HeldSession:
    """A session that the first step makes, in the thread of its runner. Any thread may close it."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        """Has no session yet. `sizes` are those of the state's dimensions."""
        self.sizes = sizes
        self._lock = threading.Lock()
        self._session: Session | None = None
        self._model: Model | None = None
        self._closed = False

    @property
    def lost(self) -> bool:
        """Whether the process with the state died."""
        return self._model is not None and not self._model.alive

    def open(self, model: Model) -> Session:
        """Returns the session, which it makes if there is none. Raises the errors of `Model.session`."""
        with self._lock:
            if self._closed:
                raise SequenceError(
                    "the sequence ended before its step ran", hint="Begin it again with `sequence_start`."
                )
            if self._session is None:
                self._model = model
                self._session = model.session(**self.sizes)
            return self._session

    def close(self) -> None:
        """Frees the state, after a step that runs. May block for a moment."""
        with self._lock:
            self._closed = True
            if self._session is not None:
                self._session.close()


@dataclass(frozen=True, eq=False)
class StepRequest(CheckedRequest):
    """A step of a sequence. `held` is the sequence's session."""

    held: HeldSession

    @classmethod
    def of(cls, request: CheckedRequest, held: HeldSession) -> StepRequest:
        """Returns a request as a step."""
        return cls(request.inputs, request.rows, request.bucket, request.size, request.outputs, held)


class StepRunner:
    """Runs steps on one copy, one by one. Only one thread uses it.

    Attributes:
        waited: Seconds that the last batch waited for other runners: none is counted.
    """

    def __init__(
        self, copy: ModelCopy, outputs: Sequence[TensorOutput], counted: Statistics, *, warm_up: bool = False
    ) -> None:
        """Prepares the way to the copy's device, in the thread that will use it. See BatchRunner."""
        self._copy = copy
        self._outputs = list(zip([output.name for output in outputs], datatypes(outputs)))
        self._arguments = arguments_of(copy.method.call)
        self._counted = counted
        self.waited = 0.0
        copy.model.use_own_stream()
        case = recorded_sequence(copy.model, copy.method.name) if warm_up else None
        if case is not None:
            with copy.slot(), copy.model.session(**case.state_sizes) as session:
                for call in case.calls:
                    session.methods[call.method](*call.args, **call.kwargs)

    def run(self, requests: Sequence[CheckedRequest], waited: Sequence[float], /) -> list[BatchResult | ServeError]:
        """Runs steps of different sequences, one after another."""
        return [self._answer(request, seconds) for request, seconds in zip(requests, waited)]

    def _answer(self, request: CheckedRequest, waited: float) -> BatchResult | ServeError:
        assert isinstance(request, StepRequest)
        try:
            with self._copy.slot():
                return self._ran(request, waited)
        except ServeError as error:
            return error
        except Exception as error:  # no step runs twice: the state may be half written
            return failure_of(self._copy, error)

    def _ran(self, request: StepRequest, waited: float) -> BatchResult:
        """Runs a step. Raises what the model raises."""
        session, device = request.held.open(self._copy.model), self._copy.device
        started = time.perf_counter()
        args, kwargs = self._arguments([tensor.to(device) for tensor in request.inputs])
        moved = time.perf_counter()
        found = tensors_in(session.methods[self._copy.method.name](*args, **kwargs))
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        ran = time.perf_counter()
        outputs = tuple(self._output(place, found[place]) for place in request.outputs)
        spent = (moved - started, ran - moved, time.perf_counter() - ran)
        self._counted.executed(1, compute_input=spent[0], compute_infer=spent[1], compute_output=spent[2])
        return BatchResult(outputs, InferTiming(waited, *spent, 1))

    def _output(self, place: int, tensor: torch.Tensor) -> OutputTensor:
        name, datatype = self._outputs[place]
        return OutputTensor(name, datatype, tuple(tensor.shape), bytes_of(tensor.cpu().contiguous()))
