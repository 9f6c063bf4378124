"""grpc.health.v1.Health: of the server as a whole, of the protocol's service, and of each model by its name.

Who probes a server has no API key, and hears of no model where one is asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress

from exportkit.serve.engine.repository import Repository
from exportkit.serve.rpc.message_classes import INFERENCE, message_class, read_message
from exportkit.serve.rpc.rpc_calls import Allow, RpcCall
from exportkit.serve.statuses import NotReadyError, NotServedError, QueueFullError, UnauthorizedError

_REQUEST = message_class("grpc.health.v1.HealthCheckRequest")
_RESPONSE = message_class("grpc.health.v1.HealthCheckResponse")
_SECONDS_BETWEEN_LOOKS = 0.5
MOST_WATCHES = 1024  # each costs something, and needs no key


class HealthService:
    """Answers from a repository."""

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
