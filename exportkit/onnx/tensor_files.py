"""Reads and writes the tensors of a call as safetensors, in every dtype, without torch."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path

from exportkit.onnx.session import Bits, bits_type

# torch's names of the dtypes that ONNX Runtime takes, by safetensors' names.
DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}
_CODES = {dtype: name for name, dtype in DTYPES.items()}


def read_inputs(path: Path, count: int) -> list[Bits]:
    """Reads `input.0` to `input.<count - 1>` of a safetensors file.

    Raises:
        KeyError: The file lacks one of them, or ONNX Runtime has no such dtype.
        SafetensorError: It is not a safetensors file.
    """
    import numpy as np
    from safetensors import deserialize

    found = dict(deserialize(path.read_bytes()))
    inputs = []
    for index in range(count):
        tensor = found[f"input.{index}"]
        dtype = DTYPES[tensor["dtype"]]
        inputs.append(Bits(dtype, np.frombuffer(tensor["data"], bits_type(dtype)).reshape(tensor["shape"])))
    return inputs


def write_outputs(path: Path, outputs: Sequence[Bits]) -> None:
    """Writes `output.<i>` to a safetensors file. The library's own writer knows NumPy's dtypes only."""
    import numpy as np

    header, offset, arrays = {}, 0, []
    for index, (dtype, array) in enumerate(outputs):
        end = offset + array.nbytes
        header[f"output.{index}"] = {"dtype": _CODES[dtype], "shape": array.shape, "data_offsets": [offset, end]}
        arrays.append(np.ascontiguousarray(array))
        offset = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for array in arrays:
            file.write(array.data if array.size else b"")
