"""What speaks HTTP for the models: the process that has them, or receivers."""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Protocol

from starlette.types import ASGIApp

from exportkit.serve.http.asgi import Middleware
from exportkit.serve.operations.api_keys import ApiKeys, RequireKey
from exportkit.serve.operations.asgi_request import AsgiRequest
from exportkit.serve.operations.connection_limits import ConnectionLimits
from exportkit.serve.operations.http_server import HttpServer
from exportkit.serve.operations.observation import Observation, ObservedApp
from exportkit.serve.operations.tls import Tls

MakeApplication = Callable[[Sequence[Middleware]], ASGIApp]
"""Makes the application, with middleware around its routes."""

Short = Callable[[AsgiRequest], bool]
"""Answers a request without the application. Returns False for one that it does not take."""

MakeShort = Callable[[Callable[[ASGIApp], ASGIApp], Callable[[], bool]], Short]
"""Makes a `Short`. It gets what observes an application that answers in its place, and whether the server drains."""


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
        make_short: MakeShort | None = None,
    ) -> None:
        """`start` starts it.

        Args:
            limits: What a connection may do.
            tls: None: no TLS.
            keys: None: no key is asked for.
            open_paths: What is answered without a key.
            observation: Sees every request.
            make_short: Makes what answers requests without the application.
        """
        self._limits = limits
        self._tls = tls
        self._keys = keys
        self._open_paths = open_paths
        self._observation = observation
        self._make_short = make_short
        self._draining = False

    async def start(self, sockets: Sequence[socket.socket], make: MakeApplication) -> None:
        """Answers connections from now on."""
        keys, paths = self._keys, self._open_paths
        application = make([] if keys is None else [partial(RequireKey, keys=keys, open_paths=paths)])

        def draining() -> bool:
            return self._draining

        def observe(app: ASGIApp) -> ASGIApp:
            return ObservedApp(app, self._observation, draining)

        short = None if self._make_short is None else self._make_short(observe, draining)
        self._http = HttpServer(observe(application), self._limits, self._observation.refused, self._tls, short)
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
