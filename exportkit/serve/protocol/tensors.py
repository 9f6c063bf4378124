"""The rules for one input, which HTTP and gRPC share, and the memory in which tensors start as torch's do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from exportkit.serve.protocol.datatypes import item_size, shown
from exportkit.serve.protocol.inference import InputTensor
from exportkit.serve.protocol.values import array_of_json, narrowed
from exportkit.serve.statuses import BadRequestError, ServeError

# torch's CPU allocator aligns to this. An operator may have relied on it in every recorded case.
ALIGNMENT = 64

LONG = 1 << 20
"""Bytes of JSON from which reading or writing them belongs into another thread.

In the event loop's thread, other requests wait meanwhile.
"""

_MOST_SIZES = 32  # more than any model has, and few enough that shapes stay cheap to check
_MOST_BYTES = (1 << 63) - 1


@dataclass(frozen=True)
class TensorSpec:
    """An input without its data, whose datatype and shape are possible. `size` is the bytes that they need."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    size: int

    @classmethod
    def of(cls, name: str, datatype: str, shape: Sequence[int]) -> TensorSpec:
        """Checks what a client says of an input.

        Raises:
            BadRequestError: There is no such datatype, or the shape is wrong.
            NotOfferedError: The datatype is BYTES.
        """
        try:
            each = item_size(datatype)
        except ServeError as error:
            raise type(error)(f"the input {shown(name)}: {error.message}") from None
        if len(shape) > _MOST_SIZES:
            raise BadRequestError(f"the input {shown(name)} has {len(shape)} sizes; at most {_MOST_SIZES} are allowed")
        if min(shape, default=0) < 0:
            raise BadRequestError(f"the input {shown(name)} has the shape {_written(shape)}; sizes are not negative")
        if max(shape, default=0) > _MOST_BYTES or (size := math.prod(shape) * each) > _MOST_BYTES:
            raise BadRequestError(f"the input {shown(name)} has the shape {_written(shape)}, which no memory can hold")
        return cls(name, datatype, tuple(shape), size)

    def check_size(self, given: int) -> None:
        """Raises BadRequestError unless so many bytes are the right number."""
        if given != self.size:
            raise BadRequestError(
                f"the input {shown(self.name)} ({self.datatype}, shape {_written(self.shape)}) "
                f"needs {self.size} bytes; {given} were given"
            )

    def of_bytes(self, data: memoryview) -> InputTensor:
        """Returns the input with data in the protocol's binary form.

        `data` is copied only if it does not start at a multiple of 64 bytes.

        Raises:
            BadRequestError: The number of bytes, or a byte of a BOOL is wrong.
        """
        self.check_size(data.nbytes)
        data = data.cast("B")
        # torch's own kernels take any other byte for true. In C++ an operator that reads it as `bool` may do anything.
        if self.datatype == "BOOL" and data.nbytes and np.frombuffer(data, np.uint8).max() > 1:
            raise BadRequestError(f"the input {shown(self.name)} is BOOL and has a byte that is neither 0 nor 1")
        return InputTensor(self.name, self.datatype, self.shape, _aligned(data))

    def of_json(self, data: memoryview) -> InputTensor:
        """Returns the input with values in JSON: a flat list, or lists nested as the shape says.

        Raises:
            BadRequestError: The number or the range of the values is wrong, or the lists are not nested evenly.
        """
        return self._of_array(array_of_json(self.name, self.datatype, self.shape, data))

    def of_numbers(self, numbers: np.ndarray) -> InputTensor:
        """Returns the input with numbers in row-major order: gRPC's `contents`, whose integers have 32 bits or more.

        Raises:
            BadRequestError: The number or the range of the values is wrong.
        """
        return self._of_array(narrowed(self.name, self.datatype, numbers))

    def _of_array(self, array: np.ndarray) -> InputTensor:
        elements = math.prod(self.shape)
        if array.size != elements:
            raise BadRequestError(
                f"the input {shown(self.name)} has {array.size} values; "
                f"its shape {_written(self.shape)} needs {elements}"
            )
        if array.ndim != 1 and elements and array.shape != self.shape:
            raise BadRequestError(
                f"the data of the input {shown(self.name)} is nested as {_written(array.shape)}; "
                f"its shape is {_written(self.shape)}",
                hint="Nest the lists as the shape says, or give one flat list in row-major order.",
            )
        return InputTensor(self.name, self.datatype, self.shape, _aligned(array.reshape(-1).view(np.uint8).data))


def aligned_bytes(size: int, start: int = 0) -> memoryview:
    """Returns `size` writable bytes without values, of which number `start` lies at a multiple of 64 bytes."""
    memory = np.empty(size + ALIGNMENT, np.uint8)
    skipped = -(_address(memory) + start) % ALIGNMENT
    return memory.data[skipped : skipped + size]


def _aligned(data: memoryview) -> memoryview:
    """Returns `data`, or a copy of it if it does not start at a multiple of 64 bytes."""
    if not data.nbytes or _address(np.frombuffer(data, np.uint8)) % ALIGNMENT == 0:
        return data
    copy = aligned_bytes(data.nbytes)
    copy[:] = data
    return copy


def _address(memory: np.ndarray) -> int:
    return int(memory.__array_interface__["data"][0])


def _written(shape: Sequence[int]) -> str:
    return "[" + ", ".join(str(length) if abs(length) < 1 << 64 else "..." for length in shape) + "]"
