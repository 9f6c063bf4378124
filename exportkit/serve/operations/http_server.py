"""uvicorn's HTTP server, as a part of our process: signals, sockets and logs are ours."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from exportkit.serve.operations.connections import KEEP_ALIVE_SECONDS, ConnectionLimits, LimitedProtocol, Refused
from exportkit.serve.operations.tls import Tls

_CLOSE_SECONDS = 2.0


class HttpServer:
    """Answers connections with an ASGI application.

    Attributes:
        ended: Done when it ends by itself, which is a failure, or was closed.
    """

    ended: asyncio.Future[None]

    def __init__(self, app: ASGIApp, limits: ConnectionLimits, refused: Refused, tls: Tls | None) -> None:
        """`start` starts it.

        Args:
            app: The application. It needs no lifespan events.
            limits: What a connection may do.
            refused: Is told of refusals that the application does not see.
            tls: None: no TLS.
        """
        protocol: Any = functools.partial(LimitedProtocol, limits=limits, refused=refused)
        self._config = uvicorn.Config(
            app,
            http=protocol,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,  # whoever can send a header could write another address into the log
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
        )
        self._config.load()
        self._config.ssl = None if tls is None else tls.context
        self._server = _Uvicorn(self._config)

    async def start(self, sockets: Sequence[socket.socket] = ()) -> None:
        """Answers the connections of listening sockets. Raises what uvicorn raises."""
        self.ended = asyncio.ensure_future(self._server.serve(list(sockets)))
        listening = asyncio.ensure_future(self._server.listening.wait())
        await asyncio.wait([self.ended, listening], return_when=asyncio.FIRST_COMPLETED)
        listening.cancel()
        if self.ended.done():
            self.ended.result()

    async def take(self, connection: socket.socket) -> None:
        """Answers a connection that somebody else accepted."""
        protocol: Any = self._config.http_protocol_class
        make = functools.partial(protocol, config=self._config, server_state=self._server.server_state, app_state={})
        with contextlib.suppress(OSError):  # the client went away, or does not speak TLS
            await asyncio.get_running_loop().connect_accepted_socket(make, connection, ssl=self._config.ssl)

    @property
    def connections(self) -> int:
        """The connections that are open."""
        return len(self._server.server_state.connections)

    @property
    def in_flight(self) -> int:
        """The requests that are not over and that this process's observers do not see: none."""
        return 0

    async def count(self) -> None:
        """Gathers what other processes counted. There are none."""

    def drain(self) -> None:
        """Says that every answer should close its connection. The application asks the repository."""

    def reload_keys(self) -> None:
        """Says that the file of API keys has changed. The application has the keys themselves."""

    async def finish(self) -> None:
        """Closes the ports and waits until every answer is sent."""
        self._server.should_exit = True
        await asyncio.shield(self.ended)

    async def close(self) -> None:
        """Ends soon, whatever is not sent yet."""
        self._server.should_exit = self._server.force_exit = True
        await asyncio.wait([self.ended], timeout=_CLOSE_SECONDS)


class _Uvicorn(uvicorn.Server):
    """uvicorn's server, which leaves signals to us."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures none."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Says when it is done."""
        await super().startup(sockets)
        self.listening.set()
