"""Sequences over ModelStreamInfer: each has a stream, and sends a step when the one before was answered.

python -m benchmarks.stream_steps PORT streams.pt2 --sizes streams=1 --streams 8 --seconds 2

prints the seconds of every step as JSON. PORT is where the server listens for gRPC.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from pathlib import Path

import grpc
from tritonclient.grpc import service_pb2

from benchmarks.serve.workload import Workload, workload

_METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"


def step(asked: Workload, sequence: int, *, start: bool) -> bytes:
    """Returns a step of a sequence as a ModelInferRequest."""
    request = service_pb2.ModelInferRequest(model_name=asked.model, raw_input_contents=asked.arrays)
    for name, datatype, shape in zip(asked.names, asked.datatypes, asked.shapes):
        request.inputs.add(name=name, datatype=datatype, shape=shape)
    request.parameters["sequence_id"].int64_param = sequence
    request.parameters["sequence_start"].bool_param = start
    return bytes(request.SerializeToString())


async def _stream(channel: grpc.aio.Channel, asked: Workload, sequence: int, seconds: float) -> list[float]:
    answers = channel.stream_stream(_METHOD, response_deserializer=service_pb2.ModelStreamInferResponse.FromString)
    call, times, later = answers(), [], step(asked, sequence, start=False)
    message, end = step(asked, sequence, start=True), time.time() + seconds
    while time.time() < end:
        begin = time.perf_counter()
        await call.write(message)
        answer = await call.read()
        times.append(time.perf_counter() - begin)
        if answer.error_message:
            raise RuntimeError(answer.error_message)
        message = later
    await call.done_writing()
    return times


async def _streams(options: argparse.Namespace) -> list[list[float]]:
    asked = workload(options.package, options.sizes)
    first = os.getpid() << 16  # of ids that no other client has
    async with grpc.aio.insecure_channel(f"127.0.0.1:{options.port}") as channel:
        each = [_stream(channel, asked, first + number, options.seconds) for number in range(options.streams)]
        return await asyncio.gather(*each)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("port", type=int)
    parser.add_argument("package", type=Path)
    parser.add_argument("--sizes", required=True)
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=2.0)
    print(json.dumps(asyncio.run(_streams(parser.parse_args()))))


if __name__ == "__main__":
    main()
