"""Steps in streams have the bits of a session of their own, in their order, whatever happens beside."""

from __future__ import annotations

import asyncio
import itertools
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from tritonclient.grpc import service_pb2

import exportkit
from tests.serve.engine import ticker
from tests.serve.rpc.echo import Served, serving

STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
FRESH = itertools.count(1000)


@pytest.fixture(scope="module")
def alone(ticker_package: Path) -> Iterator[Any]:
    with exportkit.load(ticker_package) as model:
        yield model


def step(sequence: int | str, seed: int, *, rows: int = 1, **parameters: Any) -> bytes:
    """A request for `ticker`."""
    request = service_pb2.ModelInferRequest(model_name="ticker")
    for name, value in {"sequence_id": sequence, **parameters}.items():
        kind = {bool: "bool_param", int: "int64_param", str: "string_param"}[type(value)]
        setattr(request.parameters[name], kind, value)
    for name, tensor in ticker.inputs(seed, rows).items():
        request.inputs.add(name=name, datatype="FP32", shape=tensor.shape)
        request.raw_input_contents.append(tensor.numpy().tobytes())
    return bytes(request.SerializeToString())


class Stream:
    """A client's stream, on a connection of its own."""

    def __init__(self, server: Served) -> None:
        self._channel = grpc.insecure_channel(server.address, [("grpc.use_local_subchannel_pool", 1)])
        self._sent: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._answers = self._channel.stream_stream(STREAM)(iter(self._sent.get, None))

    def put(self, *messages: bytes) -> None:
        for message in messages:
            self._sent.put(message)

    def take(self, count: int) -> list[Any]:
        return [service_pb2.ModelStreamInferResponse.FromString(next(self._answers)) for _ in range(count)]

    def leave(self) -> None:
        self._sent.put(None)
        self._answers.cancel()
        self._channel.close()


def tensors_of(answers: list[Any]) -> list[torch.Tensor]:
    assert not any(answer.error_message for answer in answers), answers
    found = [answer.infer_response for answer in answers]
    data = [torch.frombuffer(bytearray(each.raw_output_contents[0]), dtype=torch.float32) for each in found]
    return [each.view(*answer.outputs[0].shape) for each, answer in zip(data, found)]


def assert_a_session(alone: Any, answers: list[Any], seeds: list[int], rows: int = 1) -> None:
    """Checks that answers to these steps are those of a session of their own."""
    with alone.session(batch=rows) as session:
        expected = [session(*ticker.inputs(seed, rows).values()).clone() for seed in seeds]
    assert all(map(torch.equal, tensors_of(answers), expected))
    assert len(answers) == len(expected)


def test_clients_that_leave_hurt_nobody_else(server: Served, alone: Any):
    staying, ids = Stream(server), [next(FRESH) for _ in range(5)]
    staying.put(*(step(sequence, 0, sequence_start=True) for sequence in ids))
    for number in range(1, 30):
        leaving, others = Stream(server), [next(FRESH) for _ in range(3)]
        leaving.put(*(step(sequence, 0, sequence_start=True) for sequence in others))
        if number % 2:
            leaving.take(3)
        leaving.put(*(step(sequence, number) for sequence in others))
        staying.put(*(step(sequence, number) for sequence in ids))
        leaving.leave()
    found = staying.take(150)
    for which in range(5):
        assert_a_session(alone, found[which::5], list(range(30)))
    staying.leave()


@pytest.mark.slow
def test_steps_of_a_stream_wait_however_many_rows_do(loop: asyncio.AbstractEventLoop, ticker_package: Path, alone: Any):
    with serving(loop, ticker_package, max_delay=0.02, max_queued_rows=8) as server:
        stream = Stream(server)
        stream.put(*(step(1 + number % 2, number, rows=5, sequence_start=number < 2) for number in range(700)))
        found = stream.take(700)
        for which in range(2):
            assert_a_session(alone, found[which::2], list(range(which, 700, 2)), 5)
        stream.leave()
