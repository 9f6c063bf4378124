"""The HTTP server: uvicorn, in a loop that others use, too. TLS for both listeners, and certificates of clients."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from exportkit.errors import UsageError
from exportkit.serve.operations.api_keys import read_secret
from exportkit.serve.serve_options import ListenOptions

KEEP_ALIVE_SECONDS = 75
"""An idle connection stays open this long. Load balancers close theirs after 60 seconds, and must be the first."""

_HEAD_BYTES = 64 << 10
_MOST_WAITING = 1000  # requests that a client sent before it had the answer to the first
_CLOSE_SECONDS = 2.0


class _Uvicorn(uvicorn.Server):
    """uvicorn, which leaves the process's signals to us."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures none."""
        yield


class _Connection(HttpToolsProtocol):
    """A connection whose client cannot fill the memory: uvicorn keeps headers, and requests that wait, without end."""

    max_connections: int
    _head_bytes = 0  # that came since the last headers were complete, or since the last part of a body
    _in_head = False
    _answered: Any = None  # the request that is answered now; uvicorn remembers the last one that came

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            transport.close()
        # uvicorn waits for ever for the first request.
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > _HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The headers have more than {_HEAD_BYTES} bytes.")

    def send_400_response(self, msg: str) -> None:
        """Refuses what is no HTTP, as all errors are: with JSON."""
        body = msgspec.json.encode({"error": msg})
        head = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
        self.transport.write(b"%scontent-length: %d\r\n\r\n%s" % (head, len(body), body))
        self.transport.close()

    def on_message_begin(self) -> None:
        self._in_head = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # uvicorn would take a trailer for a header, which a proxy did not check
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._head_bytes, self._in_head = 0, False
        super().on_headers_complete()
        if len(self.pipeline) > _MOST_WAITING:
            self.transport.close()

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)


class HttpServer:
    """Answers connections with an ASGI application. Made in the event loop that runs it."""

    def __init__(self, app: ASGIApp, max_connections: int, tls: Tls | None) -> None:
        """Answers what `listen` accepts.

        Args:
            app: The application. It needs no lifespan events.
            max_connections: More connections are closed at once.
            tls: None: no TLS.
        """
        config = uvicorn.Config(
            app,
            interface="asgi3",
            http=type("_Limited", (_Connection,), {"max_connections": max_connections}),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",  # what is less, clients can cause
            access_log=False,
            proxy_headers=False,  # whoever connects may say anything there
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            ssl_context_factory=None if tls is None else lambda *_: tls.context,
        )
        self._server = _Uvicorn(config)
        self._sockets: list[socket.socket] = []

    async def listen(self, sockets: Sequence[socket.socket]) -> None:
        """Answers the connections of listening sockets from now on, and closes them in the end."""
        self._sockets = list(sockets)
        self._serving = asyncio.ensure_future(self._server.serve(self._sockets))
        while not self._server.started:
            await asyncio.sleep(0)
            if self._serving.done():
                self._serving.result()  # raises why

    async def finish(self) -> None:
        """Closes the ports, and waits until every answer is sent."""
        self._server.should_exit = True
        while not self._serving.done():
            await asyncio.sleep(0.02)
            # uvicorn would also wait for clients of TLS to answer the end of their connections: for half a minute.
            self._server.force_exit = self._is_closed and not self._is_sending
        await self._serving

    async def close(self) -> None:
        """Ends soon, whatever is not sent yet."""
        self._server.should_exit = self._server.force_exit = True
        await asyncio.wait([self._serving], timeout=_CLOSE_SECONDS)

    @property
    def _is_closed(self) -> bool:
        return all(listener.fileno() < 0 for listener in self._sockets)

    @property
    def _is_sending(self) -> bool:
        state = self._server.server_state
        return bool(state.tasks) or any(each.transport.get_write_buffer_size() for each in state.connections)


@dataclass(frozen=True)
class Tls:
    """The certificate, its key, and who signs the certificates of clients, all checked.

    Attributes:
        context: All of it, for HTTP.
        certificate, private_key, client_authorities: The same in PEM form, for gRPC. No authorities: clients need no
            certificate.
    """

    context: ssl.SSLContext
    certificate: bytes
    private_key: bytes
    client_authorities: bytes | None


def read_tls(listen: ListenOptions) -> Tls | None:
    """Reads what the options name. Returns None if they ask for no TLS.

    Raises:
        UsageError: An option is missing, a file cannot be used, or the key does not belong to the certificate.
    """
    if listen.certificate is None and listen.private_key is None:
        if listen.client_authorities is not None:
            raise UsageError("--client-ca needs TLS", hint="Give --tls-certificate and --tls-key too.")
        return None
    if listen.certificate is None or listen.private_key is None:
        raise UsageError("TLS needs a certificate and its key", hint="Give both --tls-certificate and --tls-key.")
    private_key = read_secret(listen.private_key, "the TLS key")
    certificate = _read(listen.certificate, "the TLS certificate")
    authorities = None
    if listen.client_authorities is not None:
        authorities = _read(listen.client_authorities, "the certificate of --client-ca")
    context = _context(listen, listen.certificate, listen.private_key, authorities)
    return Tls(context, certificate, private_key, authorities)


def _context(listen: ListenOptions, certificate: Path, private_key: Path, authorities: bytes | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _load_certificate(context, certificate, private_key)
    if authorities is not None:
        try:
            context.load_verify_locations(cadata=authorities.decode("ascii"))
        except (ssl.SSLError, ValueError) as error:
            raise UsageError(f"{listen.client_authorities} has no certificate in PEM form") from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _load_certificate(context: ssl.SSLContext, certificate: Path, private_key: Path) -> None:
    def no_password() -> str:
        raise UsageError(
            f"the TLS key {private_key} is encrypted", hint=f"Decrypt it: openssl pkey -in {private_key} -out key.pem"
        )

    try:
        context.load_cert_chain(certificate, private_key, password=no_password)
    except ssl.SSLError as error:
        if "KEY_VALUES_MISMATCH" in str(error):
            raise UsageError(f"the TLS key {private_key} does not belong to {certificate}") from error
        raise UsageError(
            f"{certificate} and {private_key} are not a certificate and its key: {error.reason or error}",
            hint="Both must be in PEM form.",
        ) from error


def _read(path: Path, kind: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"{kind} {path} cannot be read: {error.strerror}") from error
