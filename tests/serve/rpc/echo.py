"""A server over gRPC in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from tritonclient.grpc import service_pb2

from exportkit.serve.engine.repository import Repository
from exportkit.serve.request_record import RequestRecord
from exportkit.serve.rpc.grpc_server import GrpcServer, RpcOptions
from exportkit.serve.rpc.rpc_calls import RpcCall
from exportkit.serve.serve_options import ServeOptions
from tests.serve.echo_models import EchoRepository

T = TypeVar("T")
INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"


def request(size: int = 1, **fields: Any) -> bytes:
    """A message for the model `echo`."""
    tensor = service_pb2.ModelInferRequest.InferInputTensor(name="x", datatype="INT8", shape=[size])
    message = service_pb2.ModelInferRequest(
        **{"model_name": "echo", "inputs": [tensor], "raw_input_contents": [bytes(size)], **fields}
    )
    return bytes(message.SerializeToString())


class Seen(list[tuple[RpcCall, RequestRecord]]):
    """What an observer was shown, as it was then."""

    def __call__(self, call: RpcCall, record: RequestRecord) -> None:
        assert record.status  # it is complete
        self.append((call, record))


class Served:
    """What a test talks to, and the loop in which it runs.

    Attributes:
        address: Where clients find it.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, repository: Any, server: GrpcServer) -> None:
        self.loop, self.repository, self.server = loop, repository, server
        self.address = f"127.0.0.1:{server.port}"

    @property
    def model(self) -> Any:
        return self.repository.models()[0]

    def begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begins a coroutine in the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.begin(work).result(60)  # a test that would wait for ever fails

    def call(self, function: Callable[[], T]) -> T:
        """Calls a function in the server's loop."""

        async def work() -> T:
            return function()

        return self.run(work())

    def until(self, condition: Callable[[], bool]) -> None:
        """Returns when a condition holds, which the server's loop decides."""

        async def wait() -> None:
            while not condition():
                await asyncio.sleep(0.002)

        self.run(wait())


@contextmanager
def served(loop: asyncio.AbstractEventLoop, repository: Any = None, **options: Any) -> Iterator[Served]:
    """Serves a repository; without one, an echo model."""

    async def start() -> tuple[Any, GrpcServer]:
        # An asyncio.Event belongs to the loop in which it is first waited for.
        served = repository or EchoRepository()
        server = GrpcServer(served, RpcOptions(**options))
        await server.start()
        return served, server

    opened = Served(loop, *asyncio.run_coroutine_threadsafe(start(), loop).result())
    try:
        yield opened
    finally:
        opened.run(opened.server.stop(0))


@contextmanager
def serving(loop: asyncio.AbstractEventLoop, package: Path, **batch: Any) -> Iterator[Served]:
    """Serves a package."""

    async def opened() -> Repository:
        options = ServeOptions((package,))
        limits = {"batch": replace(options.batch, **batch), "sequences": replace(options.sequences, finish_seconds=0.1)}
        repository = Repository(replace(options, **limits))
        await repository.open()
        return repository

    repository = asyncio.run_coroutine_threadsafe(opened(), loop).result()
    with served(loop, repository) as server:
        yield server
        server.until(lambda: server.model.counted.pending == 0)
        server.run(repository.drain())
