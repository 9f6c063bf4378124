"""Compares the elements of tensors, of every dtype that a package can hold, with NumPy alone."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from exportkit.package.dtypes import ITEM_BYTES

if TYPE_CHECKING:
    import numpy as np

# Bits of the exponent and of the mantissa, the exponent's bias, and whether the type has infinities and, beside the
# pattern of -0, other NaNs: https://onnx.ai/onnx/technical/float8.html
_FLOAT8 = {
    "float8_e4m3fn": (4, 3, 7),
    "float8_e5m2": (5, 2, 15),
    "float8_e4m3fnuz": (4, 3, 8),
    "float8_e5m2fnuz": (5, 2, 16),
}


def greatest_difference(dtype: str, a: bytes, b: bytes) -> float:
    """Returns the greatest absolute difference of the elements of two tensors, or of two chunks of them.

    Two NaNs are equal, and an infinity equals itself. The difference is inf where only one of both is NaN or infinite.

    Args:
        dtype: torch's name of the dtype.
        a: Elements of the first tensor.
        b: As many elements of the second tensor.
    """
    import numpy as np

    if not a:
        return 0.0
    if not dtype.startswith(("float", "bfloat", "complex")):
        kind = np.dtype("uint8" if dtype == "bool" else dtype)
        one, other = np.frombuffer(a, kind), np.frombuffer(b, kind)
        # The difference of two int64 may not fit into int64, but it does fit into uint64, in which it wraps around.
        unsigned = np.dtype(f"uint{8 * kind.itemsize}")
        wide, low = np.where(one > other, one, other).view(unsigned), np.where(one > other, other, one).view(unsigned)
        return float((wide - low).max())
    first, second = widened(dtype, a), widened(dtype, b)
    with np.errstate(all="ignore"):
        difference = np.abs(first - second)
    difference[(first == second) | (np.isnan(first) & np.isnan(second))] = 0.0
    return float(np.nan_to_num(difference, nan=np.inf, posinf=np.inf).max())


def in_order(content: bytes, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> bytes:
    """Returns dense elements with these strides in the order of the indices."""
    import numpy as np

    size = ITEM_BYTES[dtype]
    kind = np.dtype(f"V{size}")
    if not content:
        return content
    view = np.ndarray(shape, kind, content, strides=tuple(size * stride for stride in strides))
    return np.ascontiguousarray(view).tobytes()


def widened(dtype: str, content: bytes) -> np.ndarray[Any, Any]:
    """Returns the elements of a floating tensor as float64. Those of a complex one are its real and imaginary parts."""
    import numpy as np

    if dtype in _FLOAT8:
        return _float8_values(dtype)[np.frombuffer(content, np.uint8)]
    if dtype == "bfloat16":
        narrow = (np.frombuffer(content, np.uint16).astype(np.uint32) << 16).view(np.float32)
    else:
        bits = 8 * ITEM_BYTES[dtype] // (2 if dtype.startswith("complex") else 1)
        narrow = np.frombuffer(content, f"float{bits}")
    with np.errstate(invalid="ignore"):  # of a NaN that signals
        return narrow.astype(np.float64)


@functools.cache
def _float8_values(dtype: str) -> np.ndarray[Any, Any]:
    """Returns the value of each of the 256 patterns of bits."""
    import numpy as np

    exponent_bits, mantissa_bits, bias = _FLOAT8[dtype]
    pattern = np.arange(256)
    mantissa = (pattern & (2**mantissa_bits - 1)) / 2**mantissa_bits
    exponent = (pattern >> mantissa_bits) & (2**exponent_bits - 1)
    value = np.where(exponent == 0, mantissa * 2.0 ** (1 - bias), (1 + mantissa) * 2.0 ** (exponent - bias))
    value = np.where(pattern >> 7, -value, value)
    if dtype.endswith("fnuz"):
        value[128] = np.nan
    elif dtype == "float8_e4m3fn":
        value[[127, 255]] = np.nan
    else:
        top = exponent == 2**exponent_bits - 1
        value[top] = np.where(mantissa[top] == 0, np.copysign(np.inf, value[top]), np.nan)
    return value
