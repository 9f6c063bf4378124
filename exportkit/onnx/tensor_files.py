"""Reads and writes the tensors of a call as safetensors, in every dtype, without torch."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

from exportkit.onnx.onnx_session import Bits, bits_type
from exportkit.package.dtypes import SAFETENSORS_DTYPES

_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}


def read_tensors(path: Path, names: Iterable[str]) -> dict[str, Bits]:
    """Reads tensors of a safetensors file by name. KeyError: one is not there, or ONNX Runtime has no such dtype."""
    import numpy as np
    from safetensors import deserialize

    found = dict(deserialize(path.read_bytes()))
    tensors = {}
    for name in names:
        tensor = found[name]
        dtype = SAFETENSORS_DTYPES[tensor["dtype"]]
        tensors[name] = Bits(dtype, np.frombuffer(tensor["data"], bits_type(dtype)).reshape(tensor["shape"]))
    return tensors


def write_tensors(path: Path, tensors: Mapping[str, Bits]) -> None:
    """Writes tensors to a safetensors file. The library's own writer knows NumPy's dtypes only."""
    import numpy as np

    header, offset, arrays = {}, 0, []
    for name, (dtype, array) in tensors.items():
        end = offset + array.nbytes
        header[name] = {"dtype": _NAMES[dtype], "shape": array.shape, "data_offsets": [offset, end]}
        arrays.append(np.ascontiguousarray(array))
        offset = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for array in arrays:
            file.write(array.data if array.size else b"")
