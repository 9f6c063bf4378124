"""What speaks HTTP for the models."""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Sequence
from functools import partial

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


class FrontEnd:
    """Answers the connections of listening sockets."""

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

    def start(self, sockets: Sequence[socket.socket], make: MakeApplication) -> None:
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

    def drain(self) -> None:
        """Every answer closes its connection from now on, so that clients go to another server."""
        self._draining = True

    async def finish(self) -> None:
        """Closes the ports and waits until every answer is sent."""
        await self._http.finish()

    async def close(self) -> None:
        """Ends soon, whatever is not sent yet."""
        await self._http.close()
