"""Runs batches on one copy of a model: what one runner does."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch

from exportkit.errors import ExportkitError, RefusedValueError
from exportkit.package.manifest import TensorOutput
from exportkit.serve.engine.checked_request import CheckedRequest, bytes_of, datatypes
from exportkit.serve.engine.model_copy import ModelCopy, WorkerLostError
from exportkit.serve.engine.statistics import Statistics
from exportkit.serve.engine.warm_up import flat_inputs
from exportkit.serve.protocol.inference import InferTiming, OutputTensor
from exportkit.serve.statuses import BackendError, BadRequestError, NotReadyError, ServeError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class BatchResult:
    """What the model answered to one request."""

    outputs: tuple[OutputTensor, ...]
    timing: InferTiming


def failure_of(copy: ModelCopy, error: Exception) -> ServeError:
    """Returns the answer to a request on which a copy failed when it ran alone."""
    if isinstance(error, RefusedValueError):
        return BadRequestError(error.message, hint=error.hint)
    if copy.lost is not None:  # by another runner's request
        return NotReadyError(copy.lost)
    copy.check_health()
    if isinstance(error, ExportkitError):
        return BackendError(error.message, hint=error.hint)
    _log.error("the model failed", exc_info=error)
    return BackendError(f"the model failed: {type(error).__name__}: {str(error).partition(chr(10))[0]}")


def parts_of(name: str, datatype: str, output: torch.Tensor, sizes: list[int] | None) -> list[OutputTensor]:
    """Returns each request's rows of an output on the CPU; `sizes` None: there is one request, and all is its.

    Memory is sliced, not tensors: at each operation of torch, this thread would wait for the interpreter's lock.
    """
    shape, data = tuple(output.shape), bytes_of(output)
    if sizes is None:
        return [OutputTensor(name, datatype, shape, data)]
    width = data.nbytes // shape[0]
    ends = list(accumulate(sizes))
    return [
        OutputTensor(name, datatype, (size, *shape[1:]), data[(end - size) * width : end * width])
        for size, end in zip(sizes, ends)
    ]


class RequestRunner(Protocol):
    """Runs batches on one copy. Only one thread uses it.

    Attributes:
        waited: The seconds that the last batch waited for other runners, with its inputs ready.
    """

    waited: float

    def run(self, requests: Sequence[CheckedRequest], waited: Sequence[float], /) -> Sequence[BatchResult | ServeError]:
        """Answers requests of one bucket, which waited for so many seconds each."""


class BatchRunner:
    """Runs batches on one copy. Only one thread uses it.

    Attributes:
        waited: The seconds that the last batch waited for other runners, with its inputs ready.
    """

    def __init__(
        self, copy: ModelCopy, outputs: Sequence[TensorOutput], counted: Statistics, *, warm_up: bool = False
    ) -> None:
        """Prepares the way to the copy's device, in the thread that will use it.

        Args:
            copy: The copy, which other runners may call as well.
            outputs: The manifest's outputs.
            counted: Counts the batches.
            warm_up: Runs the first recorded case: libraries of CUDA and OpenMP prepare themselves in each thread anew.
        """
        self._copy = copy
        self._outputs = list(zip([output.name for output in outputs], datatypes(outputs)))
        self._counted = counted
        self.waited = 0.0
        copy.model.use_own_stream()
        if warm_up and (recorded := next(copy.recorded(), None)) is not None:
            inputs = [tensor.cpu().contiguous() for tensor in flat_inputs(copy.method.call, recorded)]
            with copy.slot():
                copy.run_requests([inputs], range(len(outputs)))

    def run(self, requests: Sequence[CheckedRequest], waited: Sequence[float]) -> list[BatchResult | ServeError]:
        """Runs requests together. If that fails, each runs once more alone, so that only the bad one fails.

        Args:
            requests: Requests of one bucket.
            waited: The seconds that each of them waited.

        Returns:
            For each request its answer, or why there is none.
        """
        lost, self.waited = False, 0.0
        try:
            with self._copy.slot():
                return list(self._together(requests, waited))
        except Exception as error:
            # If the worker process died, another runner's batch may have killed it, so even one request runs again.
            lost = isinstance(error, WorkerLostError)
            if len(requests) == 1 and not lost:
                return [failure_of(self._copy, error)]
        return [self._retry_alone(request, seconds, lost=lost) for request, seconds in zip(requests, waited)]

    def _retry_alone(self, request: CheckedRequest, waited: float, *, lost: bool) -> BatchResult | ServeError:
        """Runs a request by itself, and while no other runner runs if the worker process was lost."""
        with self._copy.slot(exclusive=lost):
            if not self._copy.alive and not self._copy.restore():
                return NotReadyError(self._copy.failure or "the model was closed")
            try:
                (answer,) = self._together([request], [waited])
            except Exception as error:
                return failure_of(self._copy, error)
            return answer

    def _together(self, requests: Sequence[CheckedRequest], waited: Sequence[float]) -> Sequence[BatchResult]:
        """Runs requests in one call. Raises what the model raises."""
        wanted = sorted({place for request in requests for place in request.outputs})
        ran = self._copy.run_requests([request.inputs for request in requests], wanted)
        self.waited = ran.wait_seconds
        sizes = [request.inputs[0].shape[0] for request in requests] if len(requests) > 1 else None
        parts = {place: parts_of(*self._outputs[place], answer, sizes) for place, answer in zip(wanted, ran.outputs)}
        tensors = [tuple([parts[place][index] for place in r.outputs]) for index, r in enumerate(requests)]
        rows = sum(request.rows for request in requests)
        spent = (ran.input_seconds, ran.run_seconds, ran.output_seconds)
        self._counted.executed(rows, compute_input=spent[0], compute_infer=spent[1], compute_output=spent[2])
        queued = [seconds + ran.wait_seconds for seconds in waited]
        return [BatchResult(outputs, InferTiming(seconds, *spent, rows)) for outputs, seconds in zip(tensors, queued)]
