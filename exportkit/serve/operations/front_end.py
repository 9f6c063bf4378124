"""What speaks HTTP for the models: the process that has them, or receivers."""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Protocol

from starlette.types import ASGIApp

from exportkit.serve.http.asgi import Middleware
from exportkit.serve.operations.api_keys import ApiKeys, RequireKey
from exportkit.serve.operations.connection_limits import ConnectionLimits
from exportkit.serve.operations.http_server import HttpServer
from exportkit.serve.operations.observation import Observation, ObservedApp
from exportkit.serve.operations.tls import Tls

MakeApplication = Callable[[Sequence[Middleware]], ASGIApp]
"""Makes the application, with middleware around its routes."""


class FrontEnd(Protocol):
    """Answers the connections of listening sockets."""

    async def start(self, sockets: Sequence[socket.socket], make: MakeApplication) -> None:
        """Answers connections from now on. Raises HostError if it cannot."""

    async def count(self) -> int:
        """Brings the metrics up to date. Returns the requests that are not over."""

    def drain(self) -> None:
        """Every answer closes its connection from now on, so that clients go to another server."""

    def reload_keys(self) -> None:
        """Reads the file of API keys again. Raises UsageError if it is refused: the keys stay as they were."""

    async def finish(self) -> None:
        """Closes the ports and waits until every answer is sent."""

    async def close(self) -> None:
        """Ends soon, whatever is not sent yet."""


class LocalFrontEnd:
    """This process speaks HTTP itself: the one that has the models, or a receiver, which is given its connections."""

    def __init__(
        self,
        limits: ConnectionLimits,
        tls: Tls | None,
        keys: ApiKeys | None,
        open_paths: Collection[str],
        observation: Observation,
    ) -> None:
        """`start` starts it.

        Args:
            limits: What a connection may do.
            tls: None: no TLS.
            keys: None: no key is asked for.
            open_paths: What is answered without a key.
            observation: Sees every request.
        """
        self._limits = limits
        self._tls = tls
        self._keys = keys
        self._open_paths = open_paths
        self._observation = observation
        self._draining = False

    async def start(self, sockets: Sequence[socket.socket], make: MakeApplication) -> None:
        """Answers connections from now on."""
        keys, paths = self._keys, self._open_paths
        application = make([] if keys is None else [partial(RequireKey, keys=keys, open_paths=paths)])
        observed = ObservedApp(application, self._observation, draining=lambda: self._draining)
        self._http = HttpServer(observed, self._limits, self._observation.refused, self._tls)
        self._http.listen(sockets)

    def take(self, connection: socket.socket) -> None:
        """Answers a connection that somebody else accepted."""
        self._http.take(connection)

    @property
    def connections(self) -> int:
        """The connections that are open."""
        return self._http.connections

    async def count(self) -> int:
        """Returns the requests that are not over. The metrics hear of the others when they end."""
        return self._observation.in_flight

    def drain(self) -> None:
        """Every answer closes its connection from now on, so that clients go to another server."""
        self._draining = True

    def reload_keys(self) -> None:
        """Reads the file of API keys again. Raises UsageError if it is refused: the keys stay as they were."""
        if self._keys is not None:
            self._keys.reload()

    async def finish(self) -> None:
        """Closes the ports and waits until every answer is sent."""
        await self._http.finish()

    async def close(self) -> None:
        """Ends soon, whatever is not sent yet."""
        await self._http.close()
