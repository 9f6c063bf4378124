"""Checks a request against the manifest before it waits, so that it can spoil no other request's batch."""

from __future__ import annotations

import asyncio
import functools
import time
import warnings
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch

from exportkit.errors import InputError
from exportkit.package.manifest import Call, TensorInput, TensorOutput
from exportkit.runtime.inputs import InputPlan, describe_tensor
from exportkit.serve.batching.pending import PendingRequest
from exportkit.serve.engine.held_session import HeldSession
from exportkit.serve.engine.statistics import Statistics
from exportkit.serve.protocol.datatypes import datatype_of
from exportkit.serve.protocol.inference import InferAnswer, InferRequest, InputTensor
from exportkit.serve.statuses import BackendError, BadRequestError, DeadlineError, NotOfferedError, ServeError

DEFAULT_PRIORITY = 2  # of a request with priority 0; only 1 is served before

T = TypeVar("T")

# torch warns once in a process of memory that is read-only. Nobody writes inputs, so the warning is used up here.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.from_numpy(np.frombuffer(b"\0", np.uint8))


Outcome = InferAnswer | ServeError
"""The answer to a request, or why there is none."""


@dataclass(eq=False)
class CheckedRequest(PendingRequest):
    """A request that the model takes, on its way through a queue and a runner to its answer.

    Attributes:
        id: The client's id.
        inputs: The model's flat inputs, on the CPU, over the request's bytes.
        outputs: The places of the outputs that are wanted, in the order in which they are wanted.
        session: That of the sequence whose step it is; None: it is none.
        outcome: Gets the answer, in the event loop's thread. The queue sets it.
    """

    id: str
    inputs: list[torch.Tensor]
    outputs: Sequence[int]
    session: HeldSession | None = None
    outcome: asyncio.Future[Outcome] = field(init=False)
    _waits_in: Statistics | None = field(default=None, init=False)

    @property
    def waiting(self) -> bool:
        """Whether it counts as waiting."""
        return self._waits_in is not None

    def waits(self, counted: Statistics) -> None:
        """Counts it as waiting, unless it is counted already."""
        if not self.waiting:
            self._waits_in = counted
            counted.entered(self.rows, self.size)

    def waits_no_more(self) -> None:
        """Counts it as waiting no more."""
        if self._waits_in is not None:
            self._waits_in.left(self.rows, self.size)
            self._waits_in = None

    def end(self, outcome: Outcome) -> None:
        """Tells the outcome, unless there is one or nobody waits for it any more."""
        if not self.outcome.done():
            self.outcome.set_result(outcome)

    async def by_deadline(self, future: asyncio.Future[T | ServeError], late: str) -> T:
        """Waits for a future, until the deadline at most.

        Raises:
            DeadlineError: The deadline passed. `late` is the message.
            ServeError: The future has it.
        """
        left = None if self.deadline is None else self.deadline - time.monotonic()
        try:
            async with asyncio.timeout(left):
                found = await future
        except TimeoutError:
            raise DeadlineError(late) from None
        if isinstance(found, ServeError):
            raise found
        return found


class RequestPlan:
    """The checks of one model's requests, which are planned once."""

    def __init__(self, call: Call, *, batched: bool, stateful: bool = False) -> None:
        """Plans the checks.

        Args:
            call: The manifest's call.
            batched: Whether axis 0 of every input and output is the batch dimension.
            stateful: Whether each request must belong to a sequence. If not, none may.

        Raises:
            BackendError: The protocol has no datatype for an input or output.
        """
        tensors: tuple[TensorInput | TensorOutput, ...] = (*call.inputs, *call.outputs)
        for tensor in tensors:
            try:
                datatype_of(tensor.dtype)
            except NotOfferedError as error:
                raise BackendError(f"`{tensor.name}` cannot be served: {error.message}", hint=error.hint) from error
        self._batched = batched
        self._stateful = stateful
        self._names = [tensor.name for tensor in call.inputs]
        self._takes = "; ".join(map(describe_tensor, call.inputs)) or "no inputs"
        self._dtypes: list[torch.dtype] = [getattr(torch, tensor.dtype) for tensor in call.inputs]
        self._datatypes = datatypes(call.inputs)
        self._outputs = {output.name: place for place, output in enumerate(call.outputs)}
        self._plan = InputPlan(call, torch.device("cpu"))

    def check(self, request: InferRequest) -> CheckedRequest:
        """Checks a request.

        Raises:
            BadRequestError: The model does not take it. The message says what it takes.
            NotOfferedError: It belongs to a sequence, and the model keeps no state.
            DeadlineError: Its time is over.
        """
        if request.sequence is not None and not self._stateful:
            raise NotOfferedError(
                "the request belongs to a sequence, and this model keeps no state",
                hint="Leave `sequence_id`, `sequence_start` and `sequence_end` out.",
            )
        if request.sequence is None and self._stateful:
            raise BadRequestError(
                "the model keeps state, which belongs to a sequence of requests",
                hint="Send the parameter `sequence_id`, and `sequence_start`: true with the first request.",
            )
        outputs = self._wanted(request.outputs)
        given = {tensor.name: tensor for tensor in request.inputs}
        self._check_names(given)
        inputs = [self._tensor(given[name], place) for place, name in enumerate(self._names)]
        try:
            self._plan.check_shapes([tensor.shape for tensor in inputs])
        except InputError as error:
            raise BadRequestError(error.message, hint=error.hint) from error
        if request.timeout is not None and request.timeout <= 0:
            raise DeadlineError("the request's timeout passed before it arrived")
        now = time.monotonic()
        rows = inputs[0].shape[0] if self._batched else 1
        # A request without rows runs alone: nothing is known about a batch with such a part.
        alike: Hashable = object() if not rows else tuple(tensor.shape[1:] for tensor in inputs)
        return CheckedRequest(
            shape=alike if self._batched else None,
            rows=max(rows, 1),
            size=sum(tensor.nbytes for tensor in inputs),
            priority=request.priority or DEFAULT_PRIORITY,
            deadline=None if request.timeout is None else now + request.timeout,
            arrived=now,
            id=request.id,
            inputs=inputs,
            outputs=outputs,
        )

    def _wanted(self, names: Sequence[str] | None) -> Sequence[int]:
        if names is None:
            return range(len(self._outputs))
        if unknown := [name for name in names if name not in self._outputs]:
            raise BadRequestError(f"the model has no output `{unknown[0]}`: its outputs are {_listed(self._outputs)}")
        return [self._outputs[name] for name in names]

    def _check_names(self, given: Mapping[str, Any]) -> None:
        if unknown := [name for name in given if name not in self._names]:
            raise BadRequestError(f"the model has no input `{unknown[0]}`", hint=f"It takes {self._takes}.")
        if missing := [name for name in self._names if name not in given]:
            raise BadRequestError(f"the input `{missing[0]}` is missing", hint=f"The model takes {self._takes}.")

    def _tensor(self, given: InputTensor, place: int) -> torch.Tensor:
        wanted = self._datatypes[place]
        if given.datatype != wanted:
            raise BadRequestError(f"`{given.name}` must be {wanted}, got {given.datatype}")
        return tensor_of(given, self._dtypes[place])


def datatypes(tensors: Sequence[TensorInput | TensorOutput]) -> list[str]:
    """Returns the protocol's datatypes of inputs or outputs."""
    return [datatype_of(tensor.dtype) for tensor in tensors]


def _listed(names: Mapping[str, int]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def tensor_of(given: InputTensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns a tensor over the bytes of an input, which it keeps alive. `dtype` is that of the input's datatype."""
    if not given.data.nbytes:
        return torch.empty(given.shape, dtype=dtype)
    tensor = torch.from_numpy(np.ndarray(given.shape, _as_numpy(dtype), given.data))  # see `bytes_of`
    if dtype is torch.bfloat16:
        return tensor.view(dtype)
    if dtype is torch.bool:  # torch takes a byte of 2 for neither true nor false
        return tensor.ne(0)
    return tensor


@functools.cache
def _as_numpy(dtype: torch.dtype) -> np.dtype:
    """Returns the dtype by which NumPy handles the bytes of a tensor."""
    instead = {torch.bfloat16: torch.int16, torch.bool: torch.uint8}
    return torch.empty(0, dtype=instead.get(dtype, dtype)).numpy().dtype


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Returns the bytes of a contiguous tensor on the CPU, which they keep alive."""
    if tensor.dtype is torch.bfloat16:  # which NumPy does not have
        tensor = tensor.view(torch.int16)
    # By NumPy, whose views keep the interpreter's lock: after each view of torch's a thread would wait for it.
    data = tensor.numpy().data
    return data.cast("B") if data.nbytes else memoryview(b"")
