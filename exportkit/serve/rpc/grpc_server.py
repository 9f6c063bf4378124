"""Makes the gRPC server."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from dataclasses import dataclass
from functools import partial

from exportkit.serve.engine.repository import Repository
from exportkit.serve.listeners import Acceptor, open_port
from exportkit.serve.rpc.health_service import HealthService
from exportkit.serve.rpc.http2_connection import PREFACE_SECONDS, Connections, Http2Connection
from exportkit.serve.rpc.inference_service import InferenceService
from exportkit.serve.rpc.message_classes import HEALTH, INFERENCE, methods
from exportkit.serve.rpc.rpc_calls import Allow, Answer, Observe, RpcCall, answer_call
from exportkit.serve.rpc.rpc_stream import RpcStream
from exportkit.serve.statuses import NotOfferedError

_SMALLEST_LIMIT = 4 << 20  # gRPC's own limit: it keeps room for names, parameters and small messages
_HEADROOM = 1 << 20
_LARGEST_LIMIT = (1 << 31) - 1  # many clients' lengths are of this size
LOOK_SECONDS = 2.0

_INFER = {"ModelInfer", "ModelStreamInfer"}


@dataclass(frozen=True)
class RpcOptions:
    """How the gRPC server is reached, and by whom.

    Attributes:
        host: The address.
        port: The port. 0: the system chooses one.
        tls: TLS, which offers HTTP/2. None: no TLS.
        allow: Says whether a value of `authorization` is allowed. None: everybody may call.
        observe: Gets each request when it is over.
        max_held: The most bytes of messages that wait or are not complete; of the largest model's at least.
        max_connections: The most connections that are open at the same time. More are closed at once.
    """

    host: str = "127.0.0.1"
    port: int = 0
    tls: ssl.SSLContext | None = None
    allow: Allow | None = None
    observe: Observe | None = None
    max_held: int = 1 << 30
    max_connections: int = 1024


class GrpcServer:
    """The protocol over gRPC. All methods are for the event loop's thread.

    Attributes:
        port: The port on which it listens.
    """

    def __init__(self, repository: Repository, options: RpcOptions) -> None:
        """Binds the port. No message may be larger than those of the largest model that is loaded now.

        Raises:
            HostError: The address cannot be bound.
        """
        self._health = HealthService(repository, options.allow)
        largest = max([_SMALLEST_LIMIT, *(model.max_body for model in repository.models())]) + _HEADROOM
        self._inference = InferenceService(repository, options.observe)
        self._handlers = _Handlers(self._inference, self._health, options)
        most = min(largest, _LARGEST_LIMIT)
        self._setup = Connections(self._begin, most, max(options.max_held, 2 * most))
        self._options = options
        self._sockets = open_port(options.host, options.port, "--grpc-port")
        self.port = int(self._sockets[0].getsockname()[1])
        self._acceptor: Acceptor | None = None
        self._arriving: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Begins to accept calls."""
        self._acceptor = Acceptor(self._sockets, self._take)
        self._look()

    async def stop(self, seconds: float) -> None:
        """Accepts no more calls, waits that long for those that run, and cancels the rest."""
        self._health.stop()
        if self._acceptor is not None:
            self._acceptor.close()
        for task in self._arriving:
            task.cancel()
        for connection in list(self._setup.opened):
            connection.leave()
        self._inference.leave()
        if self._setup.tasks:
            await asyncio.wait(self._setup.tasks, timeout=seconds)
        for task in list(self._setup.tasks):
            task.cancel()
        if self._setup.tasks:
            await asyncio.wait(self._setup.tasks)
        for connection in list(self._setup.opened):
            connection.end()
        if self._timer is not None:
            self._timer.cancel()

    def _take(self, connection: socket.socket) -> None:
        """Answers a connection that was accepted. It counts from now on, whatever its client sends."""
        if len(self._setup.opened) >= self._options.max_connections:
            connection.close()
            return
        connection.setblocking(False)
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        protocol = Http2Connection(self._setup)
        task = asyncio.ensure_future(self._open(connection, protocol))
        self._arriving.add(task)
        task.add_done_callback(partial(self._arrived, connection, protocol))

    async def _open(self, connection: socket.socket, protocol: Http2Connection) -> None:
        tls = self._options.tls
        limit = {} if tls is None else {"ssl_handshake_timeout": PREFACE_SECONDS}
        with contextlib.suppress(OSError):  # the client went away, does not speak TLS, or takes too long for it
            loop = asyncio.get_running_loop()
            await loop.connect_accepted_socket(lambda: protocol, connection, ssl=tls, **limit)

    def _arrived(self, connection: socket.socket, protocol: Http2Connection, task: asyncio.Task[None]) -> None:
        self._arriving.discard(task)
        if not protocol.made:
            self._setup.opened.discard(protocol)
            connection.close()

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        for connection in list(self._setup.opened):
            connection.look(loop.time())
        self._timer = loop.call_later(LOOK_SECONDS, self._look)

    def _begin(self, stream: RpcStream) -> None:
        answer, allow = self._handlers.find(stream.method)
        stream.run(_quietly(stream, answer, allow, self._options.observe), self._setup.tasks)


async def _quietly(stream: RpcStream, answer: Answer, allow: Allow | None, observe: Observe | None) -> None:
    """Answers a call. Its client was told what this raises, and so was the log."""
    with contextlib.suppress(Exception):
        await answer_call(stream, answer, allow, observe)


class _Handlers:
    """Finds what answers a method."""

    def __init__(self, inference: InferenceService, health: HealthService, options: RpcOptions) -> None:
        allow = options.allow
        unary = {f"/{INFERENCE}/{name}": inference.method(name) for name in methods(INFERENCE).keys() - _INFER}
        self._found: dict[str, tuple[Answer, Allow | None]] = {
            **{method: (answer, allow) for method, answer in unary.items()},
            f"/{INFERENCE}/ModelInfer": (inference.infer_once, allow),
            f"/{INFERENCE}/ModelStreamInfer": (inference.infer_stream, allow),
            f"/{HEALTH}/Check": (health.check, None),  # who probes a server has no key
            f"/{HEALTH}/Watch": (health.watch, None),
        }

    def find(self, method: str) -> tuple[Answer, Allow | None]:
        """Returns what answers a method, and who may call it."""
        return self._found.get(method) or (_refuse, None)


async def _refuse(call: RpcCall) -> bytes:
    raise NotOfferedError(f"this server does not offer {call.method.rpartition('/')[2]}")
