"""Runs requests in threads without Python, for an event loop, which is told when they ended."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from exportkit.errors import ModelRunError
from exportkit.runtime.methods import MethodPlan
from exportkit.runtime.requests import Answers

Requests = Sequence[Sequence[torch.Tensor]]

_TIMES = 4  # of each run


class Background:
    """Such threads. `Model.background` makes them; one thread uses them, but for `finish`.

    Attributes:
        descriptor: A file descriptor of which something can be read while `ended` has something to return.
    """

    def __init__(
        self,
        prepared: Callable[[Requests, Sequence[int], str | None], tuple[MethodPlan, Any, list[list[torch.Tensor]]]],
        run_error: Callable[[MethodPlan, RuntimeError, Sequence[torch.Tensor]], ModelRunError],
        threads: int,
    ) -> None:
        """Starts the threads. The model checks requests by `prepared`, and says by `run_error` how its code failed."""
        self._prepared, self._run_error = prepared, run_error
        operators = torch.ops.exportkit
        self._handle: int = operators.open_background.default(threads)
        self.descriptor: int = operators.background_descriptor.default(self._handle)
        self._number = 0
        # The inputs stay here: a thread that let go of a tensor as the last would wait for Python's lock.
        self._running: dict[int, tuple[MethodPlan, list[torch.Tensor]]] = {}
        weakref.finalize(self, operators.close_background.default, self._handle)

    def begin(self, requests: Requests, outputs: Sequence[int], method: str | None = None) -> int:
        """Begins what `Model.run_requests` does, whose arguments these are, and returns the number of the run.

        Raises:
            InputError, UsageError, ModelClosedError: As there. Nothing was begun.
        """
        plan, runner, prepared = self._prepared(requests, outputs, method)
        tensors = [tensor for request in prepared for tensor in request]
        self._number += 1
        self._running[self._number] = plan, tensors
        runner.begin_requests(self._handle, self._number, tensors, len(requests), outputs)
        return self._number

    def ended(self) -> list[tuple[int, Answers | ModelRunError]]:
        """Returns the runs that ended since the last call, by their numbers: their answers, or how the code failed."""
        numbers, counts, seconds, errors, outputs = torch.ops.exportkit.ended_requests.default(self._handle)
        found: list[tuple[int, Answers | ModelRunError]] = []
        for number, count, error in zip(numbers, counts, errors):
            plan, inputs = self._running.pop(number)
            if error:
                found.append((number, self._run_error(plan, RuntimeError(error), inputs)))
            else:
                found.append((number, Answers(outputs[:count], *seconds[:_TIMES])))
            del outputs[:count], seconds[:_TIMES]
        return found

    def finish(self) -> None:
        """Waits until every run has ended, and ends the threads. `ended` still returns those runs."""
        torch.ops.exportkit.finish_background.default(self._handle)
