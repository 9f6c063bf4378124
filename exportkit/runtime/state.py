"""The state of a session: tensors that the compiled code reads and writes in place."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

import torch

from exportkit.errors import InputError, ModelRunError, RefusedValueError, SessionClosedError
from exportkit.package.archive import PackageReader
from exportkit.runtime.inputs import Spans
from exportkit.runtime.methods import MethodPlan, ModelCode
from exportkit.runtime.runner import Runner
from exportkit.runtime.weights import initial_values
from exportkit.sizes import shape_at, state_dimensions


class State(Protocol):
    """Where the tensors of a session are: in this process, or in a worker's."""

    def check(self, plan: MethodPlan, inputs: Sequence[torch.Tensor], /) -> None:
        """Checks the inputs of a call. Raises InputError if one shares memory with the state."""

    def run(self, plan: MethodPlan, inputs: list[torch.Tensor], /) -> list[torch.Tensor]:
        """Runs a method on flat, valid inputs, and returns its flat outputs. Raises the errors of `ModelCode.run`."""

    def refused(self, /) -> tuple[MethodPlan, RefusedValueError] | None:
        """Returns what an earlier call refused, after it had returned, and forgets it."""

    def fork(self, /) -> State:
        """Returns a copy."""

    def reset(self, /) -> None:
        """Restores the values that a new session begins with."""

    def tensors(self, /) -> dict[str, torch.Tensor]:
        """Returns the tensors by name."""

    def replace(self, tensors: Mapping[str, torch.Tensor], row: int | None = None, /) -> None:
        """Copies new values into the tensors of these names, or into one row of each."""

    def close(self, /) -> None:
        """Lets go of the tensors."""

    @property
    def alive(self) -> bool:
        """Whether the tensors are still there."""


class StatePlan:
    """The state that a model's sessions have, and the values that it begins with.

    `lazy` is what sessions share until they write it, by index: of a fixed size, and not written by some method.
    """

    def __init__(self, reader: PackageReader, device: torch.device) -> None:
        """Plans the state of an open package. Initial values are read when the first session is made."""
        self._reader = reader
        self._manifest = reader.manifest
        self._device = device
        self._initial: dict[int, torch.Tensor | None] = {}
        self._shared: dict[int, torch.Tensor] = {}
        self._making = threading.Lock()
        self.dimensions = state_dimensions(reader.manifest)
        written = [
            {use.index for use in method.state if use.written} for method in self._manifest.methods if method.state
        ]
        always = set.intersection(*written) if written else set()
        fixed = {i for i, each in enumerate(self._manifest.state) if all(isinstance(size, int) for size in each.shape)}
        self.lazy = frozenset(fixed - always)

    def new(self, sizes: Mapping[str, int], shared: Collection[int] = ()) -> list[torch.Tensor]:
        """Returns a session's tensors, in the manifest's order, of which some are shared: those of `lazy` may be."""
        with torch.inference_mode(False):  # such tensors could not be written outside of it
            tensors = [
                self._share(index)
                if index in shared
                else torch.empty(shape_at(each, sizes), dtype=getattr(torch, each.dtype), device=self._device)
                for index, each in enumerate(self._manifest.state)
            ]
        self.initialise(tensors, shared)
        return tensors

    def initialise(self, tensors: Sequence[torch.Tensor], shared: Collection[int] = ()) -> None:
        """Writes the initial values into a session's tensors, but for those that are shared."""
        with torch.no_grad():
            for index, tensor in enumerate(tensors):
                if index in shared:
                    continue
                if (first := self._first(index)) is None:
                    _as_bytes(tensor).zero_()
                else:
                    tensor.copy_(first)

    def _first(self, index: int) -> torch.Tensor | None:
        if index not in self._initial:
            self._initial[index] = initial_values(self._reader, self._manifest.state[index])
        return self._initial[index]

    def _share(self, index: int) -> torch.Tensor:
        """Returns the initial values on the device; zeros have one element, which is everywhere."""
        with self._making:
            if index not in self._shared:
                each, first = self._manifest.state[index], self._first(index)
                shape, dtype = shape_at(each, {}), getattr(torch, each.dtype)
                if first is None:
                    self._shared[index] = torch.zeros((), dtype=dtype, device=self._device).expand(shape)
                else:
                    self._shared[index] = first.to(self._device, copy=True)  # aligned, and nobody else's
            return self._shared[index]


class LocalState:
    """State in this process. One caller at a time may use it."""

    def __init__(
        self, code: ModelCode, plan: StatePlan, tensors: list[torch.Tensor], shared: Collection[int] = ()
    ) -> None:
        """Takes tensors that nobody writes but for this session, which copies those that are shared before it does."""
        self._code = code
        self._plan = plan
        self._shared = set(shared)
        self._owning = threading.Lock()
        self._names = [each.name for each in code.manifest.state]
        self._tensors: list[torch.Tensor] | None = tensors
        self._spans = Spans(zip(self._names, tensors))
        self._device = code.device
        self._memory: dict[str, torch.Tensor] = {}  # by method, for what its calls on a GPU refuse
        self._stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None

    @classmethod
    def new(cls, code: ModelCode, plan: StatePlan, sizes: Mapping[str, int]) -> LocalState:
        """Makes the state of a new session."""
        return cls(code, plan, plan.new(sizes, plan.lazy), plan.lazy)

    @property
    def alive(self) -> bool:
        """Whether it was not closed."""
        return self._tensors is not None

    def check(self, plan: MethodPlan, inputs: Sequence[torch.Tensor], /) -> None:
        """See `State.check`."""
        for place, tensor in enumerate(inputs):
            if (name := self._spans.overlapping(tensor)) is not None:
                said = f"`{plan.call.inputs[place].name}` shares memory with the session's {name}"
                raise InputError(said, hint="`.clone()` it first.")

    def run(self, plan: MethodPlan, inputs: list[torch.Tensor], /) -> list[torch.Tensor]:
        """See `State.run`."""
        self._own(i for i in plan.state if i in plan.written_state or self._code.manifest.state[i].initial is None)
        tensors = self.use()
        runner = self._code.runner(plan.name)
        memory = None if self._stream is None else self._memory_of(plan.name, runner)
        run = runner.run if memory is None else lambda arguments: runner.run(arguments, memory)
        return self._code.run(plan, run, inputs + [tensors[index] for index in plan.state])

    def _memory_of(self, method: str, runner: Runner) -> torch.Tensor | None:
        if method not in self._memory and (made := runner.session_memory()) is not None:
            self._memory[method] = made
        return self._memory.get(method)

    def refused(self, /) -> tuple[MethodPlan, RefusedValueError] | None:
        """See `State.refused`."""
        for name, memory in self._memory.items():
            plan, runners = self._code.plans[name], self._code.runners
            try:
                if runners is not None:
                    self._code.look(plan, runners[name], memory)
                elif memory[0] != 0:
                    said = f"a call of {name} refused a value before the model was closed"
                    raise RefusedValueError(said, hint="The session's state is lost. Load the model, and make another.")
            except RefusedValueError as error:
                return plan, error
        return None

    def fork(self, /) -> LocalState:
        """See `State.fork`. Copies on the device's current stream."""
        with torch.no_grad(), torch.inference_mode(False):
            copies = [t if i in self._shared else t.clone() for i, t in enumerate(self.use())]
            return LocalState(self._code, self._plan, copies, self._shared)

    def reset(self, /) -> None:
        """See `State.reset`."""
        self._plan.initialise(self.use(), self._shared)
        self._memory = {}

    def tensors(self, /) -> dict[str, torch.Tensor]:
        """See `State.tensors`. They are the session's own."""
        self._own(range(len(self._names)))
        return dict(zip(self._names, self.use()))

    def replace(self, tensors: Mapping[str, torch.Tensor], row: int | None = None, /) -> None:
        """See `State.replace`."""
        indices = [index for index, name in enumerate(self._names) if name in tensors]
        self._own(indices)
        own = self.use()
        with torch.no_grad():
            for index in indices:
                (own[index] if row is None else own[index][row : row + 1]).copy_(tensors[self._names[index]])
        if row is None and len(indices) == len(own):
            self._memory = {}

    def close(self, /) -> None:
        """See `State.close`. A running call finishes first, because it has the tensors."""
        self._tensors = None

    def _own(self, indices: Iterable[int]) -> None:
        """Copies what is shared of these tensors. Raises ModelRunError if there is no memory."""
        if not self._shared:
            return
        with self._owning:  # who looks at the state may do so while a call runs
            if not (wanted := self._shared.intersection(indices)):
                return
            tensors = self.use()
            try:
                with torch.no_grad(), torch.inference_mode(False):
                    for index in wanted:
                        tensors[index] = tensors[index].clone(memory_format=torch.contiguous_format)
            except RuntimeError as error:
                raise no_room(error) from error
            self._shared -= wanted
            self._spans = Spans(zip(self._names, tensors))

    def use(self) -> list[torch.Tensor]:
        """Returns the tensors for work on the device's current stream, which waits for their last stream's work."""
        tensors = self._tensors
        if tensors is None:
            raise SessionClosedError(f"the session of {self._code.manifest.name} was closed")
        if self._stream is not None:
            self._follow(self._stream, tensors)
        return tensors

    def _follow(self, last: torch.cuda.Stream, tensors: Sequence[torch.Tensor]) -> None:
        current = torch.cuda.current_stream(self._device)
        if current == last or torch.cuda.is_current_stream_capturing():  # a graph cannot wait for work outside of it
            return
        current.wait_stream(last)
        for tensor in tensors:
            tensor.record_stream(current)
        self._stream = current


def empty_state(plan: MethodPlan, sizes: Mapping[str, int]) -> list[torch.Tensor]:
    """Returns the state that a method has at these sizes, without memory: on the device "meta"."""
    described = plan.described[len(plan.call.inputs) :]
    return [torch.empty(shape_at(each, sizes), dtype=getattr(torch, each.dtype), device="meta") for each in described]


def no_room(error: RuntimeError) -> ModelRunError:
    """Returns what is said where there is no memory for a session's state."""
    text = f"the state of a session cannot be made: {str(error).partition(chr(10))[0]}"
    return ModelRunError(text, hint="`manifest.state` lists its tensors. Closed sessions free theirs.")


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)  # every dtype has zeros, but not every dtype's kernels
