"""The protocol's datatypes, and torch's names for them."""

from __future__ import annotations


def datatype_of(dtype: str) -> str:
    """Returns the datatype of a dtype of a manifest: FP32 of `float32`.

    Raises:
        NotOfferedError: The protocol has no datatype for it, as for complex64 and float8_e4m3fn.
    """
    raise NotImplementedError


def dtype_of(datatype: str) -> str:
    """Returns torch's name of a datatype: `float32` of FP32.

    Raises:
        BadRequestError: There is no such datatype.
        NotOfferedError: The datatype is BYTES. No model takes text.
    """
    raise NotImplementedError


def item_size(datatype: str) -> int:
    """Returns the bytes of an element. Raises what `dtype_of` raises."""
    raise NotImplementedError
