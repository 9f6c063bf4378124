"""An application behind the HTTP server of `exportkit serve`, in the caller's event loop."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop

from exportkit.serve.listeners import open_port
from exportkit.serve.operations.connection_limits import ConnectionLimits, Refused
from exportkit.serve.operations.http_server import HttpServer

LOOPS = pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
HOST = b"HTTP/1.1\r\nhost: x\r\n"

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connect = Callable[[], Awaitable[Streams]]


@asynccontextmanager
async def serving_app(
    app: Any,
    limits: ConnectionLimits,
    refused: Refused = lambda client, error: None,
    *,
    tls: ssl.SSLContext | None = None,
    trust: ssl.SSLContext | None = None,
) -> AsyncIterator[Connect]:
    """Serves. What it yields opens a connection, which is aborted in the end."""
    given: Any = None if tls is None else SimpleNamespace(context=tls)
    server = HttpServer(app, limits, refused, given)
    sockets = open_port("127.0.0.1", 0, "--port")
    port = sockets[0].getsockname()[1]
    server.listen(sockets)
    opened: list[asyncio.StreamWriter] = []

    async def connect(*, silent: bool = False) -> Streams:
        """With `silent`, no handshake of TLS begins."""
        context = None if silent else trust
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, limit=1 << 24)
        opened.append(writer)
        return reader, writer

    try:
        yield connect
    finally:
        for writer in opened:
            writer.transport.abort()
        await server.finish()


def run(scenario: Callable[[], Awaitable[None]], loop: Any = asyncio.new_event_loop) -> None:
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(scenario())


async def answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """The status and the body of an answer that says how long it is."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = next(int(line.partition(":")[2]) for line in head.splitlines() if line.startswith("content-length"))
    return int(head.split()[1]), await reader.readexactly(length)


async def refusal(reader: asyncio.StreamReader) -> tuple[int, str]:
    """A refusal in JSON, after which the connection is closed."""
    status, body = await answer(reader)
    assert await reader.read() == b""
    return status, json.loads(body)["error"]
