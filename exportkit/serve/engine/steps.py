"""Runs the steps of sequences, each in its session, on the copy of the model that began it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence

import torch

from exportkit.errors import ExportkitError, ModelClosedError
from exportkit.package.manifest import TensorOutput
from exportkit.runtime.model import Model
from exportkit.runtime.requests import joined
from exportkit.runtime.session import Session
from exportkit.serve.engine.checked_request import CheckedRequest, arguments_of, bytes_of, datatypes
from exportkit.serve.engine.execution import BatchResult, failure_of, parts_of
from exportkit.serve.engine.model_copy import ModelCopy, tensors_in
from exportkit.serve.engine.statistics import Statistics
from exportkit.serve.engine.step_batches import JoinedSteps
from exportkit.serve.engine.warm_up import recorded_sequence
from exportkit.serve.protocol.inference import InferTiming, OutputTensor
from exportkit.serve.statuses import SequenceError, ServeError

_log = logging.getLogger(__name__)


_ENDED = "the sequence ended before its step ran"
AGAIN = "Begin it again with `sequence_start`: its state is lost."


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

    @property
    def closed(self) -> bool:
        """Whether the sequence ended."""
        return self._closed

    def open(self, model: Model) -> Session:
        """Returns the session, which it makes if there is none. Raises the errors of `Model.session`."""
        with self._lock:
            if self._closed:
                raise SequenceError(_ENDED, hint=AGAIN)
            if self._session is None:
                self._model, self._session = model, model.session(**self.sizes)
            return self._session

    def close(self) -> None:
        """Frees the state, after a step that runs. May block for a moment."""
        with self._lock:
            self._closed = True
            if self._session is not None:
                self._session.close()
                self._session = None


class StepRequest(CheckedRequest):
    """A step of a sequence.

    Attributes:
        held: The sequence's session.
    """

    __slots__ = ("held",)

    def __init__(self, request: CheckedRequest, held: HeldSession) -> None:
        super().__init__(request.inputs, request.rows, request.bucket, request.size, request.outputs)
        self.held = held


class StepRunner:
    """Runs steps on one copy, together if the rows of their state are independent. Only one thread uses it.

    Attributes:
        waited: Seconds that the last batch waited for other runners: none is counted.
    """

    def __init__(
        self,
        copy: ModelCopy,
        outputs: Sequence[TensorOutput],
        counted: Statistics,
        *,
        dimension: str | None,
        warm_up: bool = False,
    ) -> None:
        """Prepares the way to the copy's device, in the thread that will use it. See BatchRunner.

        `dimension` is that of which each step brings a part; None if each runs alone.
        """
        self._copy = copy
        self._outputs = list(zip([output.name for output in outputs], datatypes(outputs)))
        self._arguments = arguments_of(copy.method.call)
        self._counted = counted
        self.waited = 0.0
        self._joined = None if dimension is None else JoinedSteps(copy.method, dimension)
        copy.model.use_own_stream()
        case = recorded_sequence(copy.model, copy.method.name) if warm_up else None
        if case is not None:
            with copy.slot(), copy.model.session(**case.state_sizes) as session:
                for call in case.calls:
                    session.methods[call.method](*call.args, **call.kwargs)

    def run(self, requests: Sequence[CheckedRequest], waited: Sequence[float], /) -> list[BatchResult | ServeError]:
        """Runs steps of different sequences. If they fail together, no state was changed, and each runs alone."""
        steps = [request for request in requests if isinstance(request, StepRequest)]
        if self._joined is not None:
            going = [place for place, step in enumerate(steps) if not step.held.closed]  # others would fail together
            if len(going) > 1:
                try:
                    chosen = [(steps[place], waited[place]) for place in going]
                    with self._copy.slot():
                        ran = dict(zip(going, self._together(self._joined, *zip(*chosen))))
                    return [ran.get(n) or self._answer(step, waited[n]) for n, step in enumerate(steps)]
                except ExportkitError as error:
                    _log.warning("%d steps failed together, and run one by one: %s", len(steps), error.message)
        return [self._answer(step, seconds) for step, seconds in zip(steps, waited)]

    def _together(
        self, together: JoinedSteps, steps: Sequence[StepRequest], waited: Sequence[float]
    ) -> list[BatchResult]:
        """Runs steps in one call. What it raises was raised before any state was changed, or the device is broken."""
        model, device = self._copy.model, self._copy.device
        sessions = [step.held.open(model) for step in steps]
        started = time.perf_counter()
        inputs = [tensor.to(device) for tensor in joined([step.inputs for step in steps])]
        moved = time.perf_counter()
        found, state = together.run(model, sessions, inputs)
        state.write_back()
        self._wait_for_device()
        ran = time.perf_counter()
        wanted = sorted({place for step in steps for place in step.outputs})
        sizes = [step.rows for step in steps]
        parts = {place: parts_of(*self._outputs[place], found[place].cpu().contiguous(), sizes) for place in wanted}
        spent = (moved - started, ran - moved, time.perf_counter() - ran)
        rows = sum(sizes)
        self._counted.executed(rows, compute_input=spent[0], compute_infer=spent[1], compute_output=spent[2])
        return [
            BatchResult(tuple(parts[place][number] for place in step.outputs), InferTiming(seconds, *spent, rows))
            for number, (step, seconds) in enumerate(zip(steps, waited))
        ]

    def _wait_for_device(self) -> None:
        if self._copy.device.type == "cuda":
            torch.cuda.current_stream(self._copy.device).synchronize()

    def _answer(self, request: StepRequest, waited: float) -> BatchResult | ServeError:
        try:
            with self._copy.slot():
                return self._ran(request, waited)
        except ServeError as error:
            return error
        except ModelClosedError:  # another runner found out
            return SequenceError("the sequence ended: the process with its state died", hint=AGAIN)
        except Exception as error:  # no step runs twice: the state may be half written
            if request.held.closed:  # meanwhile, so that the state was gone
                return SequenceError(_ENDED, hint=AGAIN)
            return failure_of(self._copy, error)

    def _ran(self, request: StepRequest, waited: float) -> BatchResult:
        """Runs a step. Raises what the model raises."""
        session, device = request.held.open(self._copy.model), self._copy.device
        started = time.perf_counter()
        args, kwargs = self._arguments([tensor.to(device) for tensor in request.inputs])
        moved = time.perf_counter()
        found = tensors_in(session.methods[self._copy.method.name](*args, **kwargs))
        session.synchronize()
        ran = time.perf_counter()
        outputs = tuple(self._output(place, found[place]) for place in request.outputs)
        spent = (moved - started, ran - moved, time.perf_counter() - ran)
        self._counted.executed(request.rows, compute_input=spent[0], compute_infer=spent[1], compute_output=spent[2])
        return BatchResult(outputs, InferTiming(waited, *spent, request.rows))

    def _output(self, place: int, tensor: torch.Tensor) -> OutputTensor:
        name, datatype = self._outputs[place]
        return OutputTensor(name, datatype, tuple(tensor.shape), bytes_of(tensor.cpu().contiguous()))
