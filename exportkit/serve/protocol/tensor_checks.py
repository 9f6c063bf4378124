"""The rules for one input, which HTTP and gRPC share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from exportkit.serve.protocol.aligned import aligned
from exportkit.serve.protocol.datatypes import item_size, shown
from exportkit.serve.protocol.inference import InputTensor
from exportkit.serve.protocol.values import array_of_values
from exportkit.serve.statuses import BadRequestError, ServeError

_MOST_SIZES = 32  # more than any model has, and few enough that shapes stay cheap to check
_MOST_BYTES = (1 << 63) - 1


def input_bytes(name: str, datatype: str, shape: Sequence[int]) -> int:
    """Returns the bytes of an input with this datatype and shape.

    Raises:
        BadRequestError: There is no such datatype, or the shape is wrong.
        NotOfferedError: The datatype is BYTES.
    """
    try:
        size = item_size(datatype)
    except ServeError as error:
        raise type(error)(f"the input {shown(name)}: {error.message}") from None
    if len(shape) > _MOST_SIZES:
        raise BadRequestError(f"the input {shown(name)} has {len(shape)} sizes; at most {_MOST_SIZES} are allowed")
    if min(shape, default=0) < 0:
        raise BadRequestError(f"the input {shown(name)} has the shape {_written(shape)}; sizes are not negative")
    if max(shape, default=0) > _MOST_BYTES or (total := math.prod(shape) * size) > _MOST_BYTES:
        raise BadRequestError(f"the input {shown(name)} has the shape {_written(shape)}, which no memory can hold")
    return total


def checked_input(name: str, datatype: str, shape: Sequence[int], data: memoryview) -> InputTensor:
    """Returns an input in the protocol's binary form.

    `data` is copied only if it does not start at a multiple of 64 bytes.

    Raises:
        BadRequestError: The datatype, the shape, the number of bytes, or a byte of a BOOL is wrong.
        NotOfferedError: The datatype is BYTES.
    """
    check_data_size(name, datatype, shape, data.nbytes)
    return input_of_bytes(name, datatype, shape, data)


def input_of_bytes(name: str, datatype: str, shape: Sequence[int], data: memoryview) -> InputTensor:
    """Returns an input whose datatype, shape and number of bytes were checked, as `checked_input` does.

    Raises:
        BadRequestError: A byte of a BOOL is neither 0 nor 1.
    """
    data = data.cast("B")
    # torch's own kernels take any other byte for true. In C++ an operator that reads it as `bool` may do anything.
    if datatype == "BOOL" and data.nbytes and np.frombuffer(data, np.uint8).max() > 1:
        raise BadRequestError(f"the input {shown(name)} is BOOL and has a byte that is neither 0 nor 1")
    return InputTensor(name, datatype, tuple(shape), aligned(data))


def check_data_size(name: str, datatype: str, shape: Sequence[int], size: int) -> None:
    """Raises BadRequestError unless an input of this datatype and shape has `size` bytes; else as `input_bytes`."""
    expected = input_bytes(name, datatype, shape)
    if size != expected:
        raise BadRequestError(
            f"the input {shown(name)} ({datatype}, shape {_written(shape)}) needs {expected} bytes; {size} were given"
        )


def input_of_values(name: str, datatype: str, shape: Sequence[int], values: Sequence[Any]) -> InputTensor:
    """Returns an input that was given as numbers in row-major order: gRPC's `contents`.

    No number is wrapped, rounded to an integer or turned into infinity.

    Raises:
        BadRequestError: The datatype, the shape, or the number or range of the values is wrong.
        NotOfferedError: The datatype is BYTES.
    """
    input_bytes(name, datatype, shape)
    return input_of_array(name, datatype, shape, array_of_values(name, datatype, values))


def input_of_array(name: str, datatype: str, shape: Sequence[int], array: np.ndarray) -> InputTensor:
    """Returns an input with the elements of `array`, whose shape is `shape` or flat.

    Raises:
        BadRequestError: It has another number of elements, or another shape.
    """
    elements = math.prod(shape)
    if array.size != elements:
        raise BadRequestError(
            f"the input {shown(name)} has {array.size} values; its shape {_written(shape)} needs {elements}"
        )
    if array.ndim != 1 and elements and array.shape != tuple(shape):
        raise BadRequestError(
            f"the data of the input {shown(name)} is nested as {_written(array.shape)}; its shape is {_written(shape)}",
            hint="Nest the lists as the shape says, or give one flat list in row-major order.",
        )
    return InputTensor(name, datatype, tuple(shape), aligned(array.reshape(-1).view(np.uint8).data))


def _written(shape: Sequence[int]) -> str:
    return "[" + ", ".join(str(length) if abs(length) < 1 << 64 else "..." for length in shape) + "]"
