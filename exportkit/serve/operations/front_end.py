"""What speaks HTTP for the models."""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Sequence
from functools import partial

from starlette.types import ASGIApp

from exportkit.serve.http.asgi import Middleware
from exportkit.serve.operations.api_keys import ApiKeys, RequireKey
from exportkit.serve.operations.connection_limits import ConnectionLimits
from exportkit.serve.operations.http_server import HttpServer
from exportkit.serve.operations.observation import Observation, ObservedApp
from exportkit.serve.operations.tls import Tls

MakeApplication = Callable[[Sequence[Middleware]], ASGIApp]
"""Makes the application, with middleware around its routes."""


class FrontEnd:
    """Answers the connections of listening sockets."""

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
        self._middleware = [] if keys is None else [partial(RequireKey, keys=keys, open_paths=open_paths)]
        self._observation = observation
        self._draining = False

    def start(self, sockets: Sequence[socket.socket], make: MakeApplication) -> None:
        """Answers connections from now on."""
        application = ObservedApp(make(self._middleware), self._observation, lambda: self._draining)
        self._http = HttpServer(application, self._limits, self._observation.refused, self._tls)
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
