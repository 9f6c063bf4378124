"""Runs ONNX models with ONNX Runtime, on the CPU. Does not import torch, and gives ONNX Runtime no path of a file.

Tensors are arrays of bits: unsigned integers of the element's size, because NumPy has no type for every dtype.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from exportkit.errors import HostError, ModelLoadError, OnnxFileError
from exportkit.onnx.files import open_data, read_model
from exportkit.onnx.interface import Interface
from exportkit.package.dtypes import ITEM_BYTES
from exportkit.package.manifest import Onnx

if TYPE_CHECKING:
    import numpy as np

# torch's names of the dtypes that ONNX Runtime takes, and TensorProto's numbers.
ONNX_TYPES: Mapping[str, int] = {
    "float32": 1,
    "uint8": 2,
    "int8": 3,
    "uint16": 4,
    "int16": 5,
    "int32": 6,
    "int64": 7,
    "bool": 9,
    "float16": 10,
    "float64": 11,
    "uint32": 12,
    "uint64": 13,
    "bfloat16": 16,
    "float8_e4m3fn": 17,
    "float8_e4m3fnuz": 18,
    "float8_e5m2": 19,
    "float8_e5m2fnuz": 20,
}
_DTYPES = {number: dtype for dtype, number in ONNX_TYPES.items()}
_PROVIDER = "CPUExecutionProvider"
_ERRORS_ONLY = 3  # of ONNX Runtime's levels of what it prints


class Bits(NamedTuple):
    """A tensor: torch's name of its dtype, and an array of `bits_type(dtype)` in its shape."""

    dtype: str
    array: np.ndarray


def bits_type(dtype: str) -> str:
    """Returns NumPy's name of the unsigned integer with the size of a dtype."""
    return f"uint{8 * ITEM_BYTES[dtype]}"


def import_onnxruntime() -> ModuleType:
    """Imports ONNX Runtime. HostError: it is not installed, or it does not load here."""
    try:
        import onnxruntime
    except ImportError as error:
        said = f"ONNX models need ONNX Runtime, which cannot be imported: {error}"
        raise HostError(said, hint="Install it with `pip install 'exportkit[onnx]'`.") from error
    module: ModuleType = onnxruntime
    return module


class OnnxSession:
    """A loaded ONNX model, and ONNX Runtime's version."""

    def __init__(self, model: Path, onnx: Onnx, interface: Interface, *, threads: int | None = None) -> None:
        """Reads and checks the model and its data, and loads what was read. Threads rest between calls.

        Raises:
            OnnxFileError: A file is missing or was changed, or the model has other inputs or outputs.
            ModelLoadError: ONNX Runtime refuses the model, for instance because it has no kernel for an operator.
            HostError: ONNX Runtime is not installed.
        """
        runtime = import_onnxruntime()
        self.version: str = runtime.__version__
        self._value = runtime.OrtValue
        options = runtime.SessionOptions()
        options.log_severity_level = _ERRORS_ONLY
        if threads is not None:
            options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
            # Threads that wait for the next call would take the cores from what runs in turns with it.
            options.add_session_config_entry("session.force_spinning_stop", "1")
        self._session = self._open(runtime, model, onnx, options)
        self._inputs = [value.name for value in self._session.get_inputs()]
        self._outputs = [value.name for value in self._session.get_outputs()]
        for kind, names, count in (
            ("inputs", self._inputs, len(interface.inputs)),
            ("outputs", self._outputs, len(interface.outputs)),
        ):
            if len(names) != count:
                said = f"{model.name} has {len(names)} {kind}; its sidecar describes {count}"
                raise OnnxFileError(said, hint="Export the model again.")

    def _open(self, runtime: ModuleType, model: Path, onnx: Onnx, options: Any) -> Any:
        content = read_model(model, onnx)
        with open_data(model, onnx) as file:
            if file is not None and onnx.data is not None:
                before = _version_of(file.fileno())
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if onnx.data.size else b""
                options.add_external_initializers_from_files_in_memory([onnx.data.name], [data], [onnx.data.size])
            try:
                session = runtime.InferenceSession(content, options, providers=[_PROVIDER])
            except Exception as error:  # its classes have no common base
                raise ModelLoadError(f"ONNX Runtime {self.version} cannot load {model.name}: {error}") from error
            if file is not None and _version_of(file.fileno()) != before:
                raise OnnxFileError(
                    f"the weights of {model.name} were changed while they were loaded", hint="Export the model again."
                )
        return session

    def run(self, inputs: Sequence[Bits]) -> list[Bits]:
        """Calls the model with contiguous arrays, in the interface's order, and returns the outputs in its order.

        RuntimeError: ONNX Runtime has no such dtype. If ONNX Runtime fails, its errors have no common base.
        """
        values = {}
        for name, tensor in zip(self._inputs, inputs):
            if tensor.dtype not in ONNX_TYPES:
                raise RuntimeError(f"ONNX Runtime has no dtype {tensor.dtype}")
            values[name] = self._value.ortvalue_from_numpy_with_onnx_type(tensor.array, ONNX_TYPES[tensor.dtype])
        return [_bits(value) for value in self._session.run_with_ort_values(self._outputs, values)]


def _version_of(descriptor: int) -> tuple[int, int, int]:
    """What changes when somebody writes to a file."""
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _bits(value: Any) -> Bits:
    """Returns an array in the memory of an OrtValue, which it keeps alive."""
    import numpy as np

    if not value.is_tensor() or (dtype := _DTYPES.get(value.element_type())) is None:
        raise RuntimeError(f"an output of the model is {value.data_type()}, which no package has")
    shape, kind = value.shape(), np.dtype(bits_type(dtype))
    size = kind.itemsize * int(np.prod(shape, dtype=np.int64))
    if not size:
        return Bits(dtype, np.empty(shape, kind))
    memory: Any = (ctypes.c_char * size).from_address(value.data_ptr())
    memory.owner = value  # the array keeps `memory` alive
    return Bits(dtype, np.frombuffer(memory, kind).reshape(shape))
