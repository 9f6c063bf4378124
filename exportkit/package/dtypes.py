"""The dtypes a package can hold, by torch's names, and the values of their elements. Does not import torch."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

# Bytes of one element.
ITEM_BYTES: Mapping[str, int] = {
    **dict.fromkeys(("bool", "uint8", "int8", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32", "complex32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
}
DTYPES = frozenset(ITEM_BYTES)

# By safetensors' names, which has none for complex32 and complex128.
SAFETENSORS_DTYPES: Mapping[str, str] = {
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{f"{sign}{bits}": f"{kind}{bits}" for sign, kind in (("I", "int"), ("U", "uint")) for bits in (8, 16, 32, 64)},
    **{f"F8_{form}": f"float8_{form.lower()}" for form in ("E4M3FNUZ", "E5M2", "E5M2FNUZ")},
    "F8_E4M3": "float8_e4m3fn",
    "BF16": "bfloat16",
    "BOOL": "bool",
    "C64": "complex64",
}

# Bits of the exponent and of the mantissa, and the exponent's bias: https://onnx.ai/onnx/technical/float8.html
_FLOAT8 = {
    "float8_e4m3fn": (4, 3, 7),
    "float8_e5m2": (5, 2, 15),
    "float8_e4m3fnuz": (4, 3, 8),
    "float8_e5m2fnuz": (5, 2, 16),
}


def values_of(dtype: str, content: bytes) -> np.ndarray[Any, Any]:
    """Returns the elements of a dtype: in float32 where NumPy lacks it, and those of complex32 as pairs of numbers."""
    import numpy as np

    if dtype in _FLOAT8:
        return _float8_values(dtype)[np.frombuffer(content, np.uint8)]
    if dtype == "bfloat16":
        return (np.frombuffer(content, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(content, "float16" if dtype == "complex32" else dtype)


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
        value[128] = np.nan  # the pattern of -0
    elif dtype == "float8_e4m3fn":
        value[[127, 255]] = np.nan
    else:
        top = exponent == 2**exponent_bits - 1
        value[top] = np.where(mantissa[top] == 0, np.copysign(np.inf, value[top]), np.nan)
    return value.astype(np.float32)
