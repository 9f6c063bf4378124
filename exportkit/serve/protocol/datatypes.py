"""The protocol's datatypes, and torch's names for them."""

from __future__ import annotations

from collections.abc import Mapping

from exportkit.package.dtypes import ITEM_BYTES
from exportkit.serve.statuses import BadRequestError, NotOfferedError

_DTYPES: Mapping[str, str] = {
    "BOOL": "bool",
    **{f"UINT{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
    **{f"INT{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    "FP16": "float16",
    "BF16": "bfloat16",
    "FP32": "float32",
    "FP64": "float64",
}
DATATYPES: Mapping[str, str] = {dtype: datatype for datatype, dtype in _DTYPES.items()}

# JSON has one kind of number. The protocol leaves open how it becomes one of 16 bits, and clients differ.
BINARY_ONLY = frozenset({"FP16", "BF16"})


def datatype_of(dtype: str) -> str:
    """Returns the datatype of a dtype of a manifest: FP32 of `float32`.

    Raises:
        NotOfferedError: The protocol has no datatype for it, as for complex64 and float8_e4m3fn.
    """
    if dtype not in DATATYPES:
        raise NotOfferedError(
            f"the Open Inference Protocol has no datatype for {dtype}; it has one for {', '.join(DATATYPES)}",
            hint="Let the model take and return one of these, for example by `view_as_real` or a cast.",
        )
    return DATATYPES[dtype]


def dtype_of(datatype: str) -> str:
    """Returns torch's name of a datatype: `float32` of FP32.

    Raises:
        BadRequestError: There is no such datatype.
        NotOfferedError: The datatype is BYTES. No model takes text.
    """
    if datatype == "BYTES":
        raise NotOfferedError("the datatype BYTES is for text; the models of this server take numbers only")
    if datatype not in _DTYPES:
        raise BadRequestError(f"there is no datatype {shown(datatype)}; allowed are {', '.join(_DTYPES)}")
    return _DTYPES[datatype]


def item_size(datatype: str) -> int:
    """Returns the bytes of an element. Raises what `dtype_of` raises."""
    return ITEM_BYTES[dtype_of(datatype)]


def shown(text: str) -> str:
    """Returns a client's text as an error message shows it: in quotes, and not longer than a line."""
    return f"`{shortened(text, 100)}`"


def shortened(text: object, length: int = 200) -> str:
    """Returns the beginning of a text that may be as long as a client likes."""
    written = str(text)
    return written if len(written) <= length else written[:length] + "..."
