"""The rules for one input, which HTTP and gRPC share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from exportkit.serve.protocol.inference import InputTensor


def checked_input(name: str, datatype: str, shape: Sequence[int], data: memoryview) -> InputTensor:
    """Returns an input in the protocol's binary form.

    `data` is copied only if it does not start at a multiple of 64 bytes.

    Raises:
        BadRequestError: The datatype, the shape or the number of bytes is wrong.
        NotOfferedError: The datatype is BYTES.
    """
    raise NotImplementedError


def input_of_values(name: str, datatype: str, shape: Sequence[int], values: Sequence[Any]) -> InputTensor:
    """Returns an input that was given as numbers in row-major order: gRPC's `contents`.

    No number is wrapped, rounded to an integer or turned into infinity.

    Raises:
        BadRequestError: The datatype, the shape, or the number or range of the values is wrong.
        NotOfferedError: The datatype is BYTES.
    """
    raise NotImplementedError
