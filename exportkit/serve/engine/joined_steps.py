"""Runs a step of several sequences in one call: the rows of their state are gathered, and what is written goes back."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from exportkit.package.manifest import PackagedMethod
from exportkit.runtime.model import Model
from exportkit.runtime.session import Session
from exportkit.serve.engine.model_replica import arguments_of, tensors_in
from exportkit.sizes import shape_at


class JoinedSteps:
    """Runs one method for several sessions of this process at once. Only one thread uses it."""

    def __init__(self, method: PackagedMethod, dimension: str) -> None:
        """`dimension` is that of `Batching`."""
        self._method = method.name
        self._dimension = dimension
        self._arguments = arguments_of(method.call)
        self._state = method.state
        self._memory: tuple[Model, list[torch.Tensor], int] | None = None

    def run(self, model: Model, sessions: Sequence[Session], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Runs a step of each session, with the inputs of all on the model's device.

        Returns:
            The flat outputs with the rows of all sessions.

        Raises:
            ModelRunError: The model failed. No session was changed.
        """
        sizes = [session.sizes[self._dimension] for session in sessions]
        # The sessions' own tensors: one that is closed meanwhile keeps none of the others from its state.
        states = [list(session.state.values()) for session in sessions]
        rows = self._rows(model, sum(sizes))
        with torch.no_grad():
            for use in self._state:
                torch.cat([state[use.index] for state in states], out=rows[use.index])
        together = model.session_over(rows, {self._dimension: sum(sizes)}, initialise=False)
        args, kwargs = self._arguments(inputs)
        outputs = tensors_in(together.methods[self._method](*args, **kwargs))
        together.synchronize()  # says what the call refused, before any session has its state
        with torch.no_grad():
            for use in self._state:
                if use.written:
                    for state, part in zip(states, rows[use.index].split(sizes)):
                        state[use.index].copy_(part)
        return outputs

    def _rows(self, model: Model, count: int) -> list[torch.Tensor]:
        """Returns the state of all together, in memory that the next batch uses again."""
        if self._memory is None or self._memory[0] is not model or self._memory[2] < count:
            grown = 1 << (count - 1).bit_length()
            with torch.inference_mode(False):
                state = [
                    torch.empty(
                        shape_at(each, {self._dimension: grown}), dtype=getattr(torch, each.dtype), device=model.device
                    )
                    for each in model.manifest.state
                ]
            self._memory = (model, state, grown)
        return [tensor[:count] for tensor in self._memory[1]]
