"""The HTTP server: it accepts connections, and ends with them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Sequence
from functools import partial

from starlette.types import ASGIApp

from exportkit.serve.listeners import Acceptor
from exportkit.serve.operations.connection_limits import ConnectionLimits, Refused, TooManyConnectionsError
from exportkit.serve.operations.http_connection import ConnectionSetup, HttpConnection
from exportkit.serve.operations.tls import Tls

_CLOSE_SECONDS = 2.0
_LAST_REQUESTS_SECONDS = 0.25
_SILENT_SECONDS = 60.0

_log = logging.getLogger(__name__)


class HttpServer:
    """Answers connections with an ASGI application. Made in the event loop that runs it."""

    def __init__(self, app: ASGIApp, limits: ConnectionLimits, refused: Refused, tls: Tls | None) -> None:
        """Answers what `listen` accepts.

        Args:
            app: The application. It needs no lifespan events.
            limits: What a connection may do.
            refused: Is told of refusals that the application does not see.
            tls: None: no TLS.
        """
        self._setup = ConnectionSetup(app, limits, refused)
        self._tls = None if tls is None else tls.context
        self._arriving: set[asyncio.Task[None]] = set()
        self._stopping = False
        self._says_again = 0.0
        self._acceptor = Acceptor((), self._take)

    def listen(self, sockets: Sequence[socket.socket]) -> None:
        """Answers the connections of listening sockets, which it closes in the end."""
        self._acceptor = Acceptor(sockets, self._take)

    def _take(self, connection: socket.socket) -> None:
        """Answers a connection that was accepted. It counts from now on, whatever its client sends."""
        most, refusal = self._setup.limits.connections, None
        if len(self._setup.connections) >= most:
            refusal = TooManyConnectionsError(f"{most} connections are open, which is the most")
            if self._tls is not None:  # to tell the client would take a handshake
                with connection, contextlib.suppress(OSError):
                    self._setup.refused(str(connection.getpeername()[0]), refusal)
                return
        connection.setblocking(False)
        protocol = HttpConnection(self._setup, refusal)
        task = asyncio.ensure_future(self._open(connection, protocol))
        self._arriving.add(task)
        task.add_done_callback(partial(self._arrived, connection, protocol))

    async def _open(self, connection: socket.socket, protocol: HttpConnection) -> None:
        # asyncio takes this argument only together with TLS.
        limit = {} if self._tls is None else {"ssl_handshake_timeout": self._setup.limits.header_seconds}
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(lambda: protocol, connection, ssl=self._tls, **limit)
        except ssl.SSLError as error:
            if error.reason == "HTTP_REQUEST":
                self._say_plain_http(loop.time())
        except OSError:  # the client went away, or takes too long for the handshake
            pass

    def _say_plain_http(self, now: float) -> None:
        """Says, once in a while, why a client got no answer: TLS cannot tell it."""
        if now >= self._says_again:
            self._says_again = now + _SILENT_SECONDS
            _log.warning("a client spoke plain HTTP to this port, which has TLS: its address begins with https://")

    def _arrived(self, connection: socket.socket, protocol: HttpConnection, task: asyncio.Task[None]) -> None:
        self._arriving.discard(task)
        if not protocol.opened:
            self._setup.connections.discard(protocol)
            connection.close()
        elif self._stopping:
            protocol.shutdown()

    async def finish(self) -> None:
        """Closes the ports and waits until every answer is sent.

        A client whose connection was open, or waited to be accepted, has a moment to send what it began: it is told
        that the server ends, where a closed connection would tell it nothing.
        """
        if not self._stopping:
            self._acceptor.close()
            deadline = asyncio.get_running_loop().time() + _LAST_REQUESTS_SECONDS
            while self._setup.connections and asyncio.get_running_loop().time() < deadline:
                await asyncio.sleep(0.01)
        self._stop()
        while self._setup.connections or self._setup.tasks:
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        """Ends soon, whatever is not sent yet."""
        self._stop()
        for task in self._setup.tasks:
            task.cancel()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.finish(), _CLOSE_SECONDS)

    def _stop(self) -> None:
        self._acceptor.close()
        self._stopping = True
        if self._tls is not None:  # handshakes are not waited for
            for task in self._arriving:
                task.cancel()
        for connection in list(self._setup.connections):
            connection.shutdown()
