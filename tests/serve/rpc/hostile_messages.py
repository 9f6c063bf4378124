"""Requests as clients send them, and what becomes of them in hostile hands."""

from __future__ import annotations

import random
from typing import Any

from tritonclient.grpc import service_pb2

from exportkit.serve.rpc.infer_messages import ReceivedRequest
from exportkit.serve.statuses import ServeError
from tests.serve.protocol.messages import address


def typed(name: str, datatype: str, shape: list[int], **contents: Any) -> Any:
    return service_pb2.ModelInferRequest.InferInputTensor(
        name=name, datatype=datatype, shape=shape, contents=service_pb2.InferTensorContents(**contents)
    )


def message(*inputs: Any, **fields: Any) -> Any:
    return service_pb2.ModelInferRequest(**{"model_name": "echo", "inputs": inputs, **fields})


def raw(name: str, datatype: str, shape: list[int], **parameters: Any) -> Any:
    tensor = service_pb2.ModelInferRequest.InferInputTensor(name=name, datatype=datatype, shape=shape)
    for key, value in parameters.items():
        setattr(tensor.parameters[key], "string_param" if isinstance(value, str) else "int64_param", value)
    return tensor


_X = raw("x", "FP32", [2])
_REQUESTS = [
    message(_X, raw("y", "BOOL", []), id="1", outputs=[{"name": "x"}], raw_input_contents=[bytes(8), b"\1"]),
    message(typed("x", "INT8", [2], int_contents=[1, -1]), parameters={"timeout": {"int64_param": 5}}),
    message(typed("x", "FP32", [2], fp32_contents=[1, 2]), parameters={"priority": {"uint64_param": 1}}),
    message(raw("x", "INT8", [1]), raw("y", "INT8", [1]), raw_input_contents=[b"1", b"2"]),
]
SEEDS = [each.SerializeToString() for each in _REQUESTS]
_TELLING = bytes([0, 1, 0x7F, 0x80, 0xFF, 0x1A, 0x2A, 0x2B, 0x2C, 0x3A])  # tags, and what breaks numbers and lengths


def make(chance: random.Random) -> bytes:
    """Returns a request with up to five damages."""
    data = bytearray(chance.choice(SEEDS))
    for _ in range(chance.randrange(6)):
        place = chance.randrange(len(data) + 1)
        damage = chance.randrange(4)
        if damage == 0:
            data[place : place + 1] = bytes([chance.choice(_TELLING)])
        elif damage == 1:
            data[place : place + chance.randrange(4)] = chance.randbytes(chance.randrange(4))
        elif damage == 2:
            start = chance.randrange(len(data) + 1)
            data[place:place] = data[start : start + chance.randrange(30)]
        else:
            del data[place : place + chance.randrange(1, 4)]
    return bytes(data)


def survives(data: bytes) -> bool:
    """Whether the bytes are taken as a request. What is raised otherwise is a ServeError."""
    try:
        received = ReceivedRequest(data)
        request = received.request(None)
    except ServeError:
        return False
    assert received.size == sum(tensor.data.nbytes for tensor in request.inputs), data.hex()
    assert all(tensor.data.nbytes == 0 or address(tensor.data) % 64 == 0 for tensor in request.inputs), data.hex()
    return True
