"""An application behind the HTTP protocol of `exportkit serve`, in the caller's event loop."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import uvicorn

from exportkit.serve.operations.connections import ConnectionLimits, LimitedProtocol, Refused

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
    protocol: Any = partial(LimitedProtocol, limits=limits, refused=refused)
    config = uvicorn.Config(app, port=0, http=protocol, ws="none", lifespan="off", log_config=None, access_log=False)
    config.load()
    config.ssl = tls
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    opened: list[asyncio.StreamWriter] = []

    async def connect() -> Streams:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trust, limit=1 << 24)
        opened.append(writer)
        return reader, writer

    try:
        yield connect
    finally:
        for writer in opened:
            writer.transport.abort()
        server.should_exit = True
        await task
