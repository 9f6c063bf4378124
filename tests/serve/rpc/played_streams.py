"""Connections without sockets, on which clients stream steps of sequences, and what they get."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import torch
from tritonclient.grpc import service_pb2

from exportkit.serve.batching.pending import BatchLimits
from exportkit.serve.engine.repository import Repository
from exportkit.serve.rpc import http2_frames as h2
from exportkit.serve.rpc.grpc_server import GrpcServer, RpcOptions
from exportkit.serve.rpc.http2_connection import Http2Connection
from exportkit.serve.sequences.table import SequenceLimits
from exportkit.serve.serve_options import LoadOptions, ServeOptions
from tests.serve.engine import ticker
from tests.serve.rpc.raw_http2 import STREAM, head, prefixed

Message = bytes


def step(sequence: int | str, seed: int, *, rows: int = 1, id: str = "", **parameters: Any) -> Message:
    """A request for `ticker`."""
    request = service_pb2.ModelInferRequest(model_name="ticker", id=id)
    for name, value in {"sequence_id": sequence, **parameters}.items():
        kind = {bool: "bool_param", int: "int64_param", str: "string_param"}[type(value)]
        setattr(request.parameters[name], kind, value)
    for name, tensor in ticker.inputs(seed, rows).items():
        request.inputs.add(name=name, datatype="FP32", shape=tensor.shape)
        request.raw_input_contents.append(tensor.numpy().tobytes())
    return bytes(request.SerializeToString())


class Transport:
    """Keeps what the server writes."""

    def __init__(self) -> None:
        self.frames: list[tuple[int, int, int, bytes]] = []
        self.closed = False
        self.came = asyncio.Event()

    def get_extra_info(self, name: str) -> None:
        """Nobody knows anything."""

    def write(self, data: bytes) -> None:
        at = 0
        while at < len(data):
            packed, flags, number = h2.FRAME.unpack_from(data, at)
            end = at + h2.FRAME.size + (packed >> 8)
            self.frames.append((packed & 0xFF, flags, number, data[at + h2.FRAME.size : end]))
            at = end
        assert at == len(data)
        self.came.set()

    def writelines(self, parts: list[bytes]) -> None:
        self.write(b"".join(parts))

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close


class Connection:
    """A client's."""

    def __init__(self, server: GrpcServer, window: int = 1 << 20) -> None:
        self.protocol = Http2Connection(server._setup)
        self.transport = Transport()
        self.protocol.connection_made(self.transport)
        self._calls = 0
        self._out = h2.PREFACE + h2.settings([(h2.INITIAL_WINDOW_SIZE, window)])
        self._out += h2.window_update(0, 1 << 24)

    def call(self) -> int:
        """Begins a call. Returns its number."""
        number = 2 * self._calls + 1
        self._calls += 1
        self._out += h2.frame(h2.HEADERS, h2.END_HEADERS, number, head(STREAM))
        return number

    def put(self, call: int, *messages: Message) -> None:
        """Writes messages, in one frame where they have room."""
        data = b"".join(map(prefixed, messages))
        for at in range(0, len(data), h2.MOST_FRAME):
            self._out += h2.frame(h2.DATA, 0, call, data[at : at + h2.MOST_FRAME])

    def put_frame(self, frame: bytes) -> None:
        self._out += frame

    def arrive(self, *cuts: int) -> None:
        """Lets the server have what was written, cut at these places."""
        data, self._out = self._out, b""
        places = sorted({cut % (len(data) + 1) for cut in cuts} | {0, len(data)})
        for start, end in itertools.pairwise(places):
            self.protocol.data_received(data[start:end])

    def answers(self, call: int) -> list[Any]:
        """The messages that came, as what protobuf reads of them."""
        data = b"".join(payload for kind, _, number, payload in self.transport.frames if (kind, number) == (0, call))
        found = []
        while data:
            size = int.from_bytes(data[1:5], "big")
            found.append(service_pb2.ModelStreamInferResponse.FromString(data[5 : 5 + size]))
            data = data[5 + size :]
        return found

    async def until(self, call: int, count: int) -> list[Any]:
        """Waits for so many answers."""
        async with asyncio.timeout(60):
            while len(found := self.answers(call)) < count:
                self.transport.came.clear()
                await self.transport.came.wait()
        return found


class Played:
    """A server of `ticker`."""

    def __init__(self, repository: Repository, server: GrpcServer) -> None:
        self.repository, self.server = repository, server

    @property
    def model(self) -> Any:
        return self.repository.model("ticker")

    async def close(self) -> None:
        """Ends the sequences that are left."""
        for sequences in self.repository.sequences().values():
            for sequence in sequences._table:
                sequences._end(sequence, "unloaded")
        await self.repository.drain()

    async def settled(self) -> None:
        """Waits until nothing is accepted that is not answered, and checks that nothing is counted wrongly."""
        async with asyncio.timeout(60):
            while self.model.package._accepted:
                await asyncio.sleep(0.01)
        counted = self.model.counted
        assert (counted.pending, counted.queued_rows, counted.queued_bytes) == (0, 0, 0)
        assert self.model.package.accepted_bytes == 0


async def played(
    package: Path, *, delay: float = 0.001, limits: SequenceLimits | None = None, queued: int = 1024
) -> Played:
    """Opens a server, which listens nowhere."""
    batch = BatchLimits(max_delay=delay, max_queued_rows=queued)
    repository = Repository(
        ServeOptions((package,), load=LoadOptions(), sequences=limits or SequenceLimits(), batch=batch)
    )
    await repository.open()
    return Played(repository, GrpcServer(repository, RpcOptions()))


def expected(model: Any, rows: int, seeds: list[int]) -> list[torch.Tensor]:
    """What a session of its own answers to steps."""
    with model.session(batch=rows) as session:
        return [session(*ticker.inputs(seed, rows).values()).clone() for seed in seeds]


def tensor_of(answer: Any) -> torch.Tensor:
    response = answer.infer_response
    data = bytearray(response.raw_output_contents[0])
    return torch.frombuffer(data, dtype=torch.float32).view(*response.outputs[0].shape)
