"""uvicorn as we use it: connections have a limit, and the end loses no answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop

from exportkit.serve.listeners import open_port
from exportkit.serve.operations import http_server
from exportkit.serve.operations.http_server import HttpServer

REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
LENGTH = 8 << 20


async def app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % LENGTH)]})
    await send({"type": "http.response.body", "body": bytes(LENGTH)})


@asynccontextmanager
async def listening(max_connections: int = 8) -> AsyncIterator[tuple[HttpServer, int]]:
    server, sockets = HttpServer(app, max_connections, None), open_port("127.0.0.1", 0, "--port")
    port = sockets[0].getsockname()[1]
    await server.listen(sockets)
    yield server, port
    await server.close()


def test_one_connection_too_many_is_closed_also_while_nobody_asks() -> None:
    async def scenario() -> None:
        async with listening(max_connections=3) as (_, port):
            opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
            assert await asyncio.wait_for(opened[3][0].read(), 10) == b""
            for reader, writer in opened[:3]:
                writer.write(REQUEST)
                assert int((await reader.readline()).split()[1]) == 200
                writer.close()

    uvloop.run(scenario())


def test_who_never_asks_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "KEEP_ALIVE_SECONDS", 0.1)

    async def scenario() -> None:
        async with listening() as (_, port):
            reader, _ = await asyncio.open_connection("127.0.0.1", port)
            assert await asyncio.wait_for(reader.read(), 10) == b""

    uvloop.run(scenario())


def test_an_answer_that_is_taken_slowly_is_sent_to_its_end() -> None:
    """The silent connection beside it is closed at once, and nothing new is accepted."""

    async def scenario() -> None:
        async with listening() as (server, port):
            silent, _ = await asyncio.open_connection("127.0.0.1", port)
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 16)
            writer.write(REQUEST)
            head = await reader.readuntil(b"\r\n\r\n")
            ending = asyncio.ensure_future(server.finish())
            assert await silent.read() == b""
            await asyncio.sleep(0.5)
            assert (head[:15], ending.done()) == (b"HTTP/1.1 200 OK", False)
            assert len(await reader.readexactly(LENGTH)) == LENGTH
            await asyncio.wait_for(ending, 5)
            try:
                await asyncio.open_connection("127.0.0.1", port)
            except ConnectionRefusedError:
                return
            raise AssertionError("the port is open")

    uvloop.run(scenario())
