"""Values of JSON and of gRPC's `contents`, as arrays. None is changed silently, except by rounding to a float."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import numpy as np

from exportkit.serve.protocol.datatypes import BINARY_ONLY, dtype_of, shown
from exportkit.serve.statuses import BadRequestError

# Values become objects of up to 32 bytes each. So a text with many more than the shape needs is refused before.
_SPARE = 1 << 16
_OPENING = re.compile(rb"[\s\[]*")


def array_of_json(name: str, datatype: str, shape: Sequence[int], data: memoryview) -> np.ndarray:
    """Returns the array of an input's `data` in JSON: a flat list, or lists nested as the shape says.

    Raises:
        BadRequestError: A value does not fit the datatype, or the lists are not nested evenly.
    """
    if datatype in BINARY_ONLY:
        raise BadRequestError(
            f"the input {shown(name)} is {datatype}, which cannot be given as JSON",
            hint="Send it as binary data, with `binary_data_size`.",
        )
    opening = _OPENING.match(data)
    depth = opening.group().count(b"[") if opening else 0
    if depth > 1 and depth != len(shape) and (0 not in shape or depth > len(shape)):
        raise BadRequestError(
            f"the data of the input {shown(name)} is nested {depth} deep, and its shape has {len(shape)} sizes",
            hint="Nest the lists as the shape says, or give one flat list in row-major order.",
        )
    separators = np.count_nonzero(np.frombuffer(data, np.uint8) == ord(","))
    if separators >= math.prod(shape) + _SPARE:
        raise BadRequestError(f"the input {shown(name)} has more values than its shape {list(shape)} needs")
    try:
        return _array(name, datatype, _decoder(datatype, max(1, depth)).decode(data))
    except msgspec.DecodeError as error:
        raise _refused(name, datatype, str(error)) from None


def narrowed(name: str, datatype: str, numbers: np.ndarray) -> np.ndarray:
    """Returns numbers in a datatype that may have fewer bits than they.

    Raises:
        BadRequestError: A value does not fit the datatype.
    """
    limits = _limits(datatype)
    if limits is not None and numbers.size and not limits[0] <= numbers.min() <= numbers.max() <= limits[1]:
        raise _refused(name, datatype, "a number is larger")
    return numbers.astype(numpy_dtype(datatype), copy=False)


def numpy_dtype(datatype: str) -> np.dtype:
    """Returns numpy's dtype of a datatype, little-endian. numpy has none for BF16."""
    return np.dtype(dtype_of(datatype)).newbyteorder("<")


def _array(name: str, datatype: str, values: list[Any]) -> np.ndarray:
    try:
        with np.errstate(over="ignore"):
            array = np.array(values, numpy_dtype(datatype))
    except OverflowError:
        raise _refused(name, datatype, "a number is larger") from None
    except ValueError:
        raise BadRequestError(f"the data of the input {shown(name)} is nested unevenly") from None
    if array.dtype.kind == "f" and np.isinf(array).any():  # JSON has none
        raise _refused(name, datatype, "a number is larger")
    return array


def _refused(name: str, datatype: str, why: str) -> BadRequestError:
    return BadRequestError(f"the input {shown(name)} is {datatype}, which holds {_range(datatype)}: {why}")


def _range(datatype: str) -> str:
    if datatype == "BOOL":
        return "`true` and `false`"
    limits = _limits(datatype)
    if limits is None:
        return f"finite numbers up to {np.finfo(numpy_dtype(datatype)).max:.9g}"
    return f"whole numbers, written without a point, from {limits[0]} to {limits[1]}"


def _limits(datatype: str) -> tuple[int, int] | None:
    dtype = numpy_dtype(datatype)
    return (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)) if dtype.kind in "iu" else None


@functools.lru_cache(maxsize=512)  # of eleven datatypes and as many depths as a shape has sizes
def _decoder(datatype: str, depth: int) -> msgspec.json.Decoder[list[Any]]:
    return msgspec.json.Decoder(_lists_of(datatype, depth))


def _lists_of(datatype: str, depth: int) -> Any:
    kind: Any = bool if datatype == "BOOL" else float
    if (limits := _limits(datatype)) is not None:
        # msgspec bounds integers by int64's range only. numpy refuses what is too large for uint64.
        kind = Annotated[int, msgspec.Meta(ge=limits[0], le=limits[1] if limits[1] < 1 << 63 else None)]
    for _ in range(depth):
        kind = list[kind]
    return kind
