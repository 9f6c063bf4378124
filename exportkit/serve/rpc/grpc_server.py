"""Makes the gRPC server, and answers who asks for its health."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import grpc

from exportkit.errors import HostError
from exportkit.serve.engine.repository import Repository
from exportkit.serve.listeners import url_host
from exportkit.serve.rpc.inference_service import InferenceService
from exportkit.serve.rpc.message_classes import HEALTH, INFERENCE, message_class, read_message
from exportkit.serve.rpc.rpc_calls import Allow, CallRules, Observe, RpcCall, streaming, unary
from exportkit.serve.statuses import NotOfferedError, NotReadyError, NotServedError, QueueFullError, UnauthorizedError

_REQUEST = message_class("grpc.health.v1.HealthCheckRequest")
_RESPONSE = message_class("grpc.health.v1.HealthCheckResponse")
_SECONDS_BETWEEN_LOOKS = 0.5
MOST_WATCHES = 1024  # each costs something, and needs no key


class HealthService:
    """grpc.health.v1.Health: of the server as a whole, of the protocol's service, and of each model by its name.

    Who probes a server has no API key, and hears of no model where one is asked for.
    """

    def __init__(self, repository: Repository, allow: Allow | None = None) -> None:
        """`allow` says who may hear of models. None: everybody."""
        self._repository = repository
        self._allow = allow
        self._stopping = asyncio.Event()
        self._watches = 0

    def stop(self) -> None:
        """Says NOT_SERVING to every Watch and ends it."""
        self._stopping.set()

    async def check(self, call: RpcCall) -> bytes:
        """Answers Check."""
        service = read_message(_REQUEST, await call.message()).service
        status = self._status(service, call)
        if status == "SERVICE_UNKNOWN":
            raise NotServedError(f"no model or service is named {service!r}")
        return bytes(_RESPONSE(status=status).SerializeToString())

    async def watch(self, call: RpcCall) -> AsyncGenerator[bytes, None]:
        """Answers Watch: the status now, and again whenever it changes."""
        service = read_message(_REQUEST, await call.message()).service
        if self._watches >= MOST_WATCHES:
            raise QueueFullError(f"{MOST_WATCHES} clients watch already", hint="Check asks once.")
        self._watches += 1
        try:
            last = None
            while not self._stopping.is_set():
                if (status := self._status(service, call)) != last:
                    yield bytes(_RESPONSE(status=status).SerializeToString())
                    last = status
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), _SECONDS_BETWEEN_LOOKS)
            if last != "NOT_SERVING":
                yield bytes(_RESPONSE(status="NOT_SERVING").SerializeToString())
        finally:
            self._watches -= 1

    def _status(self, service: str, call: RpcCall) -> str:
        if service in {"", INFERENCE}:
            return "SERVING" if self._repository.ready else "NOT_SERVING"
        try:
            call.check_key(self._allow)
            return "SERVING" if self._repository.named(service).ready else "NOT_SERVING"
        except NotReadyError:
            return "NOT_SERVING"
        except (NotServedError, UnauthorizedError):
            return "SERVICE_UNKNOWN"


_SMALLEST_LIMIT = 4 << 20  # gRPC's own limit: it keeps room for names, parameters and small messages
_HEADROOM = 1 << 20
_CLOSE_SECONDS = 1.0  # that clients have to say goodbye
_LARGEST_LIMIT = (1 << 31) - 1  # gRPC's lengths are of this size

_CHANNEL = (
    # Two servers on one port would each get a part of the connections, and nobody would know.
    ("grpc.so_reuseport", 0),
    # Calls beyond these wait at the client, for each connection.
    ("grpc.max_concurrent_streams", 256),
    # Closes what opens a connection and then says nothing.
    ("grpc.server_handshake_timeout_ms", 10_000),
    # Finds clients that vanished without a word.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    # Clients may look for us as often. gRPC's default of five minutes ends the connections of those that do.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.max_send_message_length", -1),
)


@dataclass(frozen=True)
class RpcOptions:
    """How the gRPC server is reached, and by whom.

    Attributes:
        host: The address.
        port: The port. 0: the system chooses one.
        credentials: TLS, as `credentials_of` returns it. None: no TLS.
        allow: Says whether a value of `authorization` is allowed. None: everybody may call.
        observe: Gets each request when it is over.
        interceptors: See each call before its handler does.
        max_connections: The most connections that are open at the same time. More are closed at once.
    """

    host: str = "127.0.0.1"
    port: int = 0
    credentials: grpc.ServerCredentials | None = None
    allow: Allow | None = None
    observe: Observe | None = None
    interceptors: Sequence[grpc.aio.ServerInterceptor] = ()
    max_connections: int = 1024


def credentials_of(certificate: bytes, private_key: bytes, authorities: bytes | None) -> grpc.ServerCredentials:
    """Returns TLS of PEM files. With authorities, each client has to have a certificate that one of them signed."""
    return grpc.ssl_server_credentials([(private_key, certificate)], authorities, authorities is not None)


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
        largest = max([_SMALLEST_LIMIT, *(model.max_body for model in repository.models())]) + _HEADROOM
        limits = (
            ("grpc.max_receive_message_length", min(largest, _LARGEST_LIMIT)),
            ("grpc.max_allowed_incoming_connections", options.max_connections),
        )
        self._health = HealthService(repository, options.allow)
        self._inference = InferenceService(repository)
        self._server = grpc.aio.server(options=[*_CHANNEL, *limits], interceptors=list(options.interceptors))
        rules = CallRules(options.allow, options.observe)
        self._accepted = rules.accepted
        self._server.add_generic_rpc_handlers((_Handlers(self._inference, self._health, rules),))
        self.port = self._bind(options)

    def _bind(self, options: RpcOptions) -> int:
        address = f"{url_host(options.host)}:{options.port}"
        try:
            if options.credentials is None:
                return int(self._server.add_insecure_port(address))
            return int(self._server.add_secure_port(address, options.credentials))
        except RuntimeError as error:
            raise HostError(
                f"gRPC cannot listen on {address}", hint="The port may be taken: choose another with --grpc-port."
            ) from error

    async def start(self) -> None:
        """Begins to accept calls."""
        await self._server.start()

    async def stop(self, seconds: float) -> None:
        """Accepts no more calls, waits that long for the answers to what was accepted, and gives up the rest."""
        self._health.stop()
        self._inference.leave()
        stopping = asyncio.ensure_future(self._server.stop(seconds))
        while self._accepted and not stopping.done():
            await asyncio.sleep(0.02)
        # gRPC would also wait for clients that are stuck in a message, or do not answer its last ping.
        await asyncio.wait([stopping], timeout=_CLOSE_SECONDS)


class _Handlers(grpc.GenericRpcHandler):
    """Finds the handler of a method."""

    def __init__(self, inference: InferenceService, health: HealthService, rules: CallRules) -> None:
        self._open = replace(rules, allow=None)  # who probes a server has no key
        stream, check, watch = f"/{INFERENCE}/ModelStreamInfer", f"/{HEALTH}/Check", f"/{HEALTH}/Watch"
        answers = {f"/{INFERENCE}/{name}": answer for name, answer in inference.answers().items()}
        self._found = {
            **{method: unary(method, answer, rules) for method, answer in answers.items()},
            stream: streaming(stream, inference.infer_stream, rules),
            check: unary(check, health.check, self._open),
            watch: streaming(watch, health.watch, self._open),
        }

    def service(self, details: Any) -> Any:
        """Returns the handler of `details.method`."""
        return self._found.get(details.method) or unary(details.method, _refuse, self._open)


async def _refuse(call: RpcCall) -> bytes:
    raise NotOfferedError(f"this server does not offer {call.method.rpartition('/')[2]}")
