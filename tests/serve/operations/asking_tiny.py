"""Requests of the tiny model, and what it answers."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch

from tests.runtime import tiny
from tests.serve.protocol import messages

INFER = "/v2/models/tiny/infer"
NAMES = ("image", "query.features", "offset")


def arrays(batch: int = 1) -> list[np.ndarray[Any, Any]]:
    """Inputs, always the same."""
    torch.manual_seed(0)
    args, kwargs = tiny.example(batch, gh=1)
    return [tensor.numpy() for tensor in (args[0], args[1]["features"], kwargs["offset"])]


def expected(inputs: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """The output `regions.mean`, by eager."""
    image, features, offset = map(torch.from_numpy, inputs)
    answer = tiny.Tiny()(image, {"features": features, "mode": "scaled"}, offset=offset)
    return answer["regions"].mean.numpy()


def body() -> bytes:
    """A request as JSON."""
    tensors = [
        {"name": name, "datatype": "FP32", "shape": array.shape, "data": array.ravel().tolist()}
        for name, array in zip(NAMES, arrays())
    ]
    return json.dumps({"inputs": tensors, "outputs": [{"name": "regions.mean"}]}).encode()


def mean(answer: bytes) -> np.ndarray[Any, Any]:
    """The output `regions.mean` of an answer."""
    output = json.loads(answer)["outputs"][0]
    return np.array(output["data"], np.float32).reshape(output["shape"])


def triton_inputs(module: Any, inputs: list[np.ndarray[Any, Any]]) -> list[Any]:
    """The inputs for tritonclient's module `http` or `grpc`."""
    return messages.triton_inputs(module, dict(zip(NAMES, inputs)))
