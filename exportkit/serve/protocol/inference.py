"""A request and its answer, as HTTP and gRPC hand them to a model.

Tensors are bytes in row-major order, little-endian, as the protocol's binary form has them.
"""

from __future__ import annotations

import msgspec


class InputTensor(msgspec.Struct, frozen=True):
    """An input. `data` starts at a multiple of 64 bytes, and may be read-only."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: memoryview


class SequenceStep(msgspec.Struct, frozen=True):
    """Which step of which sequence a request is.

    Attributes:
        id: The sequence's id: a number or a text, which are never equal.
        start: Whether the sequence begins with this request.
        end: Whether it ends with it.
        owner: Whose the sequence is: another client's of the same id is another sequence. Empty: anybody's.
        adapter: The name of the adapter that it begins with. None: no adapter.
    """

    id: int | str
    start: bool = False
    end: bool = False
    owner: str = ""
    adapter: str | None = None


class InferRequest(msgspec.Struct, frozen=True):
    """A request, whose inputs fit their datatypes and shapes. Whether the model takes them is not checked yet.

    Attributes:
        inputs: The inputs, in the request's order. No name is there twice.
        outputs: The names of the outputs that are wanted; None: all.
        id: The request's id, which the answer repeats. Empty: none.
        priority: 1 is served first; 0 is the model's default.
        timeout: Seconds within which the answer must be there. None: as long as it takes.
        sequence: Which step of a sequence it is. None: it belongs to none.
        method: The method that the package's name stands for. None: the default one, or the one that is named.
    """

    inputs: tuple[InputTensor, ...]
    outputs: tuple[str, ...] | None = None
    id: str = ""
    priority: int = 0
    timeout: float | None = None
    sequence: SequenceStep | None = None
    method: str | None = None

    def owned_by(self, owner: str) -> InferRequest:
        """Returns the request of a client."""
        if self.sequence is None or not owner:
            return self
        return msgspec.structs.replace(self, sequence=msgspec.structs.replace(self.sequence, owner=owner))


class OutputTensor(msgspec.Struct, frozen=True):
    """An output."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: memoryview


class InferTiming(msgspec.Struct, frozen=True):
    """Where a request's time went, in seconds, and how many rows ran together."""

    queue: float
    compute_input: float
    compute_infer: float
    compute_output: float
    batch_rows: int


class InferAnswer(msgspec.Struct, frozen=True):
    """The answer to a request."""

    model: str
    version: str
    id: str
    outputs: tuple[OutputTensor, ...]
    timing: InferTiming
