"""Reads and writes the tensors of a call as safetensors, in every dtype, without torch."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path

from exportkit.onnx.session import Bits, bits_type
from exportkit.package.dtypes import SAFETENSORS_DTYPES

_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}


def read_inputs(path: Path, count: int, call: int = 0) -> list[Bits]:
    """Reads the inputs of a call, `<call>.input.0` to `<call>.input.<count - 1>`, of a safetensors file.

    Raises:
        KeyError: The file lacks one of them, or ONNX Runtime has no such dtype.
        SafetensorError: It is not a safetensors file.
    """
    import numpy as np
    from safetensors import deserialize

    found = dict(deserialize(path.read_bytes()))
    inputs = []
    for index in range(count):
        tensor = found[f"{call}.input.{index}"]
        dtype = SAFETENSORS_DTYPES[tensor["dtype"]]
        inputs.append(Bits(dtype, np.frombuffer(tensor["data"], bits_type(dtype)).reshape(tensor["shape"])))
    return inputs


def write_outputs(path: Path, outputs: Sequence[Bits], call: int = 0) -> None:
    """Writes `<call>.output.<i>` to a safetensors file. The library's own writer knows NumPy's dtypes only."""
    import numpy as np

    header, offset, arrays = {}, 0, []
    for index, (dtype, array) in enumerate(outputs):
        end = offset + array.nbytes
        header[f"{call}.output.{index}"] = {"dtype": _NAMES[dtype], "shape": array.shape, "data_offsets": [offset, end]}
        arrays.append(np.ascontiguousarray(array))
        offset = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for array in arrays:
            file.write(array.data if array.size else b"")
