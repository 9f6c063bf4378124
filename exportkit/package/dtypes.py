"""The dtypes a package can hold, by torch's names. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping

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
