"""Models that answer with their inputs, whose every step a test decides, and a server of them in a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from exportkit.serve.engine.repository import IndexEntry, Repository
from exportkit.serve.protocol.inference import InferAnswer, InferRequest, InferTiming, OutputTensor
from exportkit.serve.rpc.grpc_server import GrpcServer, RpcOptions
from exportkit.serve.serve_options import ServeOptions
from exportkit.serve.statuses import DeadlineError, NotReadyError, NotServedError, ServeError, TooLargeError

T = TypeVar("T")


class EchoModel:
    """A model whose outputs are its inputs.

    Attributes:
        requests: What it was asked.
        running, cancelled: The number of requests that wait for `gate`, and of those that were cancelled.
        gate: Nothing is answered before it is set.
        refusal: What `admit` raises.
        failure: What `infer` raises.
    """

    name, version, names, ready = "echo", "1", ("echo",), True

    def __init__(self, max_body: int = 64 << 20) -> None:
        self.max_body = max_body
        self.requests: list[InferRequest] = []
        self.admitted: list[int] = []
        self.running = self.cancelled = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.refusal: ServeError | None = None
        self.failure: Exception | None = None

    @contextmanager
    def admit(self, size: int, *, waits: bool = False) -> Iterator[None]:
        if size > self.max_body:
            raise TooLargeError(f"{size} bytes are more than {self.max_body}")
        if self.refusal is not None:
            raise self.refusal
        self.admitted.append(size)
        yield

    async def infer(self, request: InferRequest) -> InferAnswer:
        self.requests.append(request)
        self.running += 1
        try:
            await asyncio.wait_for(self.gate.wait(), request.timeout)
        except TimeoutError:
            raise DeadlineError("the request's timeout passed while it waited") from None
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        if self.failure is not None:
            raise self.failure
        wanted = [each for each in request.inputs if request.outputs is None or each.name in request.outputs]
        outputs = tuple(OutputTensor(each.name, each.datatype, each.shape, each.data) for each in wanted)
        return InferAnswer(self.name, self.version, request.id, outputs, InferTiming(0, 0, 0, 0, 1))

    def metadata(self) -> dict[str, Any]:
        return {"name": self.name, "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 3]}]}

    def config(self) -> dict[str, Any]:
        return {"name": self.name, "max_batch_size": 4}

    def statistics(self) -> dict[str, Any]:
        return {"name": self.name, "version": self.version, "inference_stats": {"success": {"count": 1, "ns": 5}}}


class EchoRepository:
    """A repository of such a model, in which `load` and `unload` only write down what they were asked."""

    def __init__(self, max_body: int = 64 << 20) -> None:
        self.echo = EchoModel(max_body)
        self.draining = False
        self.lost: str | None = None
        self.asked: list[tuple[str, Any]] = []
        self.loading = asyncio.Event()
        self.loading.set()

    @property
    def ready(self) -> bool:
        return not self.draining and self.echo.ready

    def model(self, name: str, version: str = "", method: str | None = None) -> EchoModel:
        if name != "echo" or version not in ("", "1"):
            raise NotServedError(f"no model is named {name} with version {version!r}")
        if self.draining:
            raise NotReadyError("the server drains")
        return self.echo

    named = model

    def models(self) -> Sequence[EchoModel]:
        return [self.echo]

    def index(self) -> Sequence[IndexEntry]:
        return [IndexEntry("echo", "1", "READY", ""), IndexEntry("broken", "1", "UNAVAILABLE", "it cannot be loaded")]

    async def load(self, name: str, parameters: Mapping[str, Any]) -> None:
        await self.loading.wait()
        self.asked.append(("load", (name, dict(parameters))))

    async def unload(self, name: str) -> None:
        self.asked.append(("unload", name))


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
def loop_thread() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


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
