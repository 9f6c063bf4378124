"""Steps of sequences for a model with state, as gRPC's messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tritonclient.grpc import service_pb2

from exportkit.serve.protocol.datatypes import DATATYPES


def step(model: Any, sequence: int, *, start: bool = False, end: bool = False) -> bytes:
    """A step of one row of random inputs."""
    message = service_pb2.ModelInferRequest(model_name=model.name)
    for tensor in model.call.inputs:
        shape = [size if isinstance(size, int) else 1 for size in tensor.shape]
        element = torch.rand(shape, generator=torch.Generator().manual_seed(sequence)).to(getattr(torch, tensor.dtype))
        message.inputs.add(name=tensor.name, datatype=DATATYPES[tensor.dtype], shape=shape)
        message.raw_input_contents.append(element.numpy().tobytes())
    message.parameters["sequence_id"].int64_param = sequence
    for name, value in (("sequence_start", start), ("sequence_end", end)):
        if value:
            message.parameters[name].bool_param = True
    return bytes(message.SerializeToString())


def steps_of(model: Any) -> Sequence[bytes]:
    """Steps of three sequences: beginnings, plain ones, ends."""
    found = []
    for sequence in (1, 2, 3):
        found += [step(model, sequence, start=True), step(model, sequence, end=True)]
        found += [step(model, sequence)] * 4
    return found
