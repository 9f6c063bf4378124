"""The process of a server: it checks, listens, loads, answers, and drains.

The order:

1. Options, keys and TLS files are read, and the packages' structure and signatures are checked.
2. The ports are opened. `live` is 200 from here on, `ready` is 503.
3. The models are loaded and warmed up. Then `ready` is 200.
4. If a GPU is lost to the process, as after an illegal address, `live` is 503, too. So is the answer to what waits, and
   the process ends with an exit code of its own. Worker processes are replaced instead.
5. SIGTERM or SIGINT: `ready` is 503, and so is what is new. What was accepted is answered.
6. The ports are closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import uvloop
from prometheus_client import disable_created_metrics
from starlette.types import ASGIApp

from exportkit.errors import ExportkitError, UsageError
from exportkit.runtime.targets import parse_device
from exportkit.serve.engine.repository import Repository
from exportkit.serve.engine.servable import check_packages
from exportkit.serve.http.asgi import make_app
from exportkit.serve.http.exchange import HttpOptions
from exportkit.serve.listeners import allow_files, is_loopback, open_port, reserve_port, url_host
from exportkit.serve.operations.api_keys import ApiKeys, RequireKey
from exportkit.serve.operations.http_server import HttpServer, Tls, read_tls
from exportkit.serve.operations.metrics import Metrics
from exportkit.serve.operations.observation import AccessLog, LineWriter, Observation, Observer
from exportkit.serve.page.page_routes import open_paths as page_paths
from exportkit.serve.page.page_routes import page_routes
from exportkit.serve.process_settings import collect_requests, keep_freed_memory, log_failures, shorten_switch_interval
from exportkit.serve.request_record import RequestRecord
from exportkit.serve.rpc.grpc_server import GrpcServer, RpcOptions, credentials_of
from exportkit.serve.rpc.rpc_calls import RpcCall
from exportkit.serve.serve_options import ListenOptions, ServeOptions

if TYPE_CHECKING:
    from exportkit.serve.operations.tracing import Traces


class NotAnsweredError(ExportkitError):
    """Accepted requests were not answered within the drain timeout."""


class DeviceLostError(ExportkitError):
    """A GPU is broken for this process, and every model on it. Another process can use it."""

    exit_code = 6


@dataclass(frozen=True)
class Started:
    """A server that is ready.

    Attributes:
        pid: Its process id.
        http: Its URL.
        grpc: The address of gRPC; None without.
        models: The name and version of every model.
    """

    pid: int
    http: str
    grpc: str | None
    models: tuple[dict[str, Any], ...]


Ready = Callable[[Started], None]
Report = Callable[[str], None]
_SECONDS_BETWEEN_LOOKS = 0.25  # for a GPU that is lost
_SECONDS_TO_WRITE = 2.0  # what is left of the access log
_SECONDS_TO_GIVE_UP = 10.0  # for what runs on it or was answered


def run(options: ServeOptions, *, started: Ready, report: Report) -> bool:
    """Serves until SIGTERM or SIGINT. Must be called in the main thread.

    Args:
        options: What to serve, and how.
        started: Is called when every model is ready.
        report: Gets what an operator should know, a line at a time.

    Returns:
        Whether nothing of the server runs any more. False: a signal came while models were loaded, and a thread is
        still at it; end the process without waiting for it.

    Raises:
        UsageError: Options contradict one another, or a file that they name cannot be used.
        PackageError: A package is refused.
        HostError: A port is in use, or a package does not run on this machine.
        NotAnsweredError: The drain timeout passed.
        DeviceLostError: A GPU is lost to this process.
        KeyboardInterrupt: A second SIGINT.
    """
    tls, keys = _checked(options)
    keep_freed_memory()
    shorten_switch_interval()
    for warning in _warnings(options.listen):
        report(f"warning: {warning}")
    log_failures()
    disable_created_metrics()
    allow_files(2 * options.listen.max_connections)  # HTTP's and gRPC's
    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)
    server = _Server(options, tls, keys, started, report)
    try:
        return loop.run_until_complete(server.serve())
    finally:
        with contextlib.suppress(RuntimeError):  # tasks that were cut off still run
            loop.close()


def _checked(options: ServeOptions) -> tuple[Tls | None, ApiKeys | None]:
    """Refuses before anything listens what can be refused then."""
    for device in options.load.devices:
        parse_device(device)
    listen = options.listen
    tls = read_tls(listen)
    keys = None if listen.api_keys is None else ApiKeys(listen.api_keys)
    check_packages(options.packages, options.load.public_keys, sequences=options.sequences.most > 0)
    return tls, keys


def _warnings(listen: ListenOptions) -> Iterator[str]:
    if is_loopback(listen.host):
        return
    if listen.api_keys is None and listen.client_authorities is None:
        yield f"whoever reaches {listen.host} may use the models. --api-keys or --client-ca ask who it is."
    if listen.api_keys is not None and listen.certificate is None:
        yield "API keys cross the network in clear text. --tls-certificate and --tls-key encrypt them."


def _traces_to(endpoint: str) -> Traces:
    from exportkit.serve.operations.tracing import traces_to  # its packages are an extra

    return traces_to(endpoint)


class _Server:
    """What runs in the loop."""

    def __init__(
        self, options: ServeOptions, tls: Tls | None, keys: ApiKeys | None, started: Ready, report: Report
    ) -> None:
        self._options = options
        self._tls = tls
        self._keys = keys
        self._started = started
        self._report = report
        self._repository = Repository(options, report)
        self._metrics = Metrics(self._repository)
        self._log = LineWriter(sys.stderr.fileno(), self._metrics.log_lines_lost.inc) if options.access_log else None
        self._traces = None if options.traces is None else _traces_to(options.traces)
        observers: list[Observer] = [self._metrics]
        if self._log is not None:
            observers.append(AccessLog(self._log))
        if self._traces is not None:
            observers.append(self._traces)
        self._observation = Observation(observers)
        self._metrics.in_flight.set_function(lambda: self._observation.in_flight)
        self._draining = False
        self._stop = asyncio.Event()
        self._interrupted = asyncio.Event()

    # --- the life of the server ---------------------------------------------------------------------------------------

    async def serve(self) -> bool:
        """Serves until a signal. Returns whether nothing is left that runs.

        Raises:
            ExportkitError: As `run` says.
            KeyboardInterrupt: A second SIGINT.
        """
        self._catch_signals()
        work = asyncio.ensure_future(self._serve())
        try:
            await _first(work, self._interrupted.wait())
            if not work.done():
                raise KeyboardInterrupt
            return work.result()
        finally:
            if self._log is not None:
                self._log.close(_SECONDS_TO_WRITE)
            if self._traces is not None:
                self._traces.close()

    async def _serve(self) -> bool:
        listen = self._options.listen
        sockets = open_port(listen.host, listen.port, "--port")
        http = await self._start_http(sockets)
        try:
            reserved = None if listen.grpc_port is None else reserve_port(listen.host, listen.grpc_port, "--grpc-port")
            scheme = "http" if self._tls is None else "https"
            url = f"{scheme}://{url_host(listen.host)}:{sockets[0].getsockname()[1]}"
            self._report(f"listening on {url}; loading models")
            opening = asyncio.ensure_future(self._repository.open())
            await _first(opening, self._stop.wait())
            if not opening.done():
                return False
            try:
                opening.result()
                collect_requests()
                grpc = await self._start_grpc(reserved)
            except ExportkitError:
                await self._repository.drain()  # frees the models that were loaded before
                raise
            self._say_ready(url, grpc)
            await _first(self._stop.wait(), self._loss())
            if (lost := self._repository.lost) is not None:
                await self._give_up(http, grpc, lost)
            await self._drain(http, grpc)
        finally:
            await http.close()
        return True

    async def _start_http(self, sockets: Sequence[socket.socket]) -> HttpServer:
        metrics = self._metrics.route()
        open_paths = {"/v2/health/live", "/v2/health/ready", *page_paths()}
        app: ASGIApp = make_app(
            self._repository,
            HttpOptions(),
            routes=[metrics, *page_routes(self._repository)],
            middleware=[] if self._keys is None else [partial(RequireKey, keys=self._keys, open_paths=open_paths)],
        )
        app = self._observation.wrap(app, lambda: self._draining)
        if self._traces is not None:
            app = self._traces.wrap(app)
        server = HttpServer(app, self._options.listen.max_connections, self._tls)
        await server.listen(sockets)
        return server

    async def _start_grpc(self, reserved: socket.socket | None) -> GrpcServer | None:
        if reserved is None:
            return None
        tls = self._tls
        options = RpcOptions(
            host=self._options.listen.host,
            port=reserved.getsockname()[1],
            credentials=None
            if tls is None
            else credentials_of(tls.certificate, tls.private_key, tls.client_authorities),
            allow=None if self._keys is None else self._keys.allow,
            observe=self._observe_call,
            interceptors=[] if self._traces is None else [self._traces.interceptor()],
            max_connections=self._options.listen.max_connections,
        )
        with reserved:
            server = GrpcServer(self._repository, options)
        await server.start()
        return server

    def _observe_call(self, call: RpcCall, record: RequestRecord) -> None:
        record.method, record.remote = call.method, call.remote
        self._observation.finished(record)

    def _say_ready(self, url: str, grpc: GrpcServer | None) -> None:
        models = tuple(
            {"name": model.name, "version": model.version, "devices": list(model.devices)}
            for model in self._repository.models()
        )
        address = None if grpc is None else f"{url_host(self._options.listen.host)}:{grpc.port}"
        if not models:
            folder = self._options.repository
            self._report(
                f"no model: {folder} has no FILE.pt2 and no NAME/VERSION/model.pt2. It is not watched; "
                "POST /v2/repository/models/NAME/load loads what is put there"
            )
        self._report(f"ready: HTTP on {url}" + (f", gRPC on {address}" if address else ""))
        self._started(Started(pid=os.getpid(), http=url, grpc=address, models=models))

    async def _loss(self) -> None:
        """Waits until this process can no longer call a model."""
        while self._repository.lost is None:
            await asyncio.sleep(_SECONDS_BETWEEN_LOOKS)

    async def _give_up(self, http: HttpServer, grpc: GrpcServer | None, reason: str) -> NoReturn:
        self._report(f"error: {reason}; what waits is answered with 503")
        self._repository.abandon(reason)
        with contextlib.suppress(NotAnsweredError):
            await self._drain(http, grpc, most=_SECONDS_TO_GIVE_UP)
        raise DeviceLostError(reason, hint="A new process can use it; `--isolate` starts one by itself")

    async def _drain(self, http: HttpServer, grpc: GrpcServer | None, most: float = math.inf) -> None:
        seconds = min(self._options.drain_seconds, most)
        self._report("draining: what was accepted is answered, what is new is refused")

        async def answered() -> None:
            self._draining = True  # every answer closes its connection, so that clients go to another server
            await self._repository.drain()
            await asyncio.gather(http.finish(), *([] if grpc is None else [grpc.stop(seconds)]))

        try:
            await asyncio.wait_for(answered(), seconds)
        except TimeoutError:
            raise NotAnsweredError(
                f"accepted requests were not answered within {seconds:g} seconds", hint="--drain-timeout allows more."
            ) from None
        self._report("every accepted request was answered")

    # --- signals ------------------------------------------------------------------------------------------------------

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._stop.set)
        loop.add_signal_handler(signal.SIGINT, self._interrupt)
        # A terminal that closes sends it, too.
        loop.add_signal_handler(signal.SIGHUP, self._stop.set if self._keys is None else self._reload)

    def _interrupt(self) -> None:
        if self._stop.is_set():
            self._interrupted.set()
        self._stop.set()

    def _reload(self) -> None:
        if self._keys is None:
            return
        try:
            self._keys.reload()
            self._report(f"read the API keys of {self._options.listen.api_keys} again")
        except UsageError as error:
            self._report(f"error: the API keys stay as they were: {error.message}")


async def _first(*awaited: Awaitable[Any]) -> None:
    """Waits until one of these is done. Those that are no futures are given up then."""
    tasks = [asyncio.ensure_future(each) for each in awaited]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task, each in zip(tasks, awaited):
            if task is not each:
                task.cancel()
