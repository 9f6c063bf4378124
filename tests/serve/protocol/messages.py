"""What the tests of the protocol's messages share."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from tritonclient.utils import np_to_triton_dtype

from exportkit.serve.protocol.http_request import BodyRules, ParsedBody, body_buffer, header_length_of, parse_body
from exportkit.serve.protocol.inference import InferAnswer, InferTiming, OutputTensor

# numpy's dtypes, written apart from the product's table.
NUMPY: Mapping[str, Any] = {
    "BOOL": np.bool_,
    "UINT8": np.uint8,
    "UINT16": np.uint16,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
    "INT8": np.int8,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "FP16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "FP32": np.float32,
    "FP64": np.float64,
}
AS_JSON = tuple(datatype for datatype in NUMPY if datatype not in ("FP16", "BF16"))

METADATA = {
    "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 3]}],
    "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1]}],
}


def parsed(
    header: object,
    binary: bytes = b"",
    length: str | None = "right",
    *,
    metadata: Mapping[str, Any] = METADATA,
    batched: bool = True,
    max_bytes: int = 1 << 20,
) -> ParsedBody:
    """Sends a header, as bytes or as an object, and binary data through the parser, as a server does."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    if length == "right":
        length = str(len(text)) if binary else None
    number = header_length_of(length)
    body = body_buffer(len(text) + len(binary), number)
    body[:] = text + binary
    rules = BodyRules(metadata["inputs"], metadata["outputs"], batched, max_bytes)
    return parse_body(body, number, rules)


def described(name: str = "x", datatype: str = "FP32", shape: Sequence[int] = (1, 3), **more: Any) -> dict[str, Any]:
    """Returns an input of a request's JSON."""
    return {"name": name, "datatype": datatype, "shape": list(shape), **more}


def answer_of(arrays: Mapping[str, tuple[str, np.ndarray]], id: str = "") -> InferAnswer:
    """Returns an answer with these outputs: the datatype and the array of each."""
    outputs = tuple(
        OutputTensor(name, datatype, array.shape, array.reshape(-1).view(np.uint8).data)
        for name, (datatype, array) in arrays.items()
    )
    return InferAnswer("model", "1", id, outputs, InferTiming(0.0, 0.0, 0.0, 0.0, 1))


def triton_inputs(module: Any, arrays: Mapping[str, np.ndarray], **how: Any) -> list[Any]:
    """Returns the inputs for tritonclient's module `http` or `grpc`."""
    made = [module.InferInput(name, list(each.shape), np_to_triton_dtype(each.dtype)) for name, each in arrays.items()]
    return [tensor.set_data_from_numpy(array, **how) for tensor, array in zip(made, arrays.values())]


def address(data: memoryview) -> int:
    """Returns where the bytes lie."""
    return int(np.frombuffer(data, np.uint8).__array_interface__["data"][0])
