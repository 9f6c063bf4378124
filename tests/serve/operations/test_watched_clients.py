"""A server tells an application when its client goes away, and only then, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from exportkit.serve.http.exchange import FILL, WATCH
from exportkit.serve.operations.connection_limits import ConnectionLimits
from tests.serve.operations.limited_server import LOOPS, Connect, run, serving_app

LIMITS = ConnectionLimits(header_seconds=600.0, idle_seconds=600.0)


class Watcher:
    """Reads the body, watches the client, and answers when it may."""

    def __init__(self) -> None:
        self.there: list[bool] = []  # what each `watch` said
        self.told = 0
        self.began, self.may_answer, self.left = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.may_watch = asyncio.Event()
        self.may_watch.set()

    def leave(self) -> None:
        self.told += 1
        self.left.set()

    async def __call__(self, scope: dict[str, Any], receive: Callable[[], Awaitable[Any]], send: Any) -> None:
        fill, watch = (scope["extensions"][name] for name in (FILL, WATCH))
        size = int(dict(scope["headers"]).get(b"content-length", b"0"))
        await fill(memoryview(bytearray(size)), lambda came: None)
        await self.may_watch.wait()
        self.there.append(watch(self.leave))
        self.began.set()
        waits = [asyncio.ensure_future(event.wait()) for event in (self.may_answer, self.left)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        watch(None)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})


@asynccontextmanager
async def watching() -> AsyncIterator[tuple[Watcher, Connect]]:
    app = Watcher()
    async with serving_app(app, LIMITS) as connect:
        yield app, connect


def request(size: int) -> bytes:
    return b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % size + bytes(size)


@LOOPS
@pytest.mark.parametrize("size", [0, 100, 200_000, 3 << 20])
@pytest.mark.parametrize("abruptly", [False, True])
def test_the_application_is_told_once_that_its_client_went_away(loop: Any, size: int, abruptly: bool) -> None:
    async def scenario() -> None:
        async with watching() as (app, connect):
            _, writer = await connect()
            writer.write(request(size))
            await app.began.wait()
            assert app.told == 0
            if abruptly:
                writer.transport.abort()
            else:
                writer.close()
            await app.left.wait()
            assert (app.there, app.told) == ([True], 1)

    run(scenario, loop)


@LOOPS
def test_an_application_that_has_answered_is_not_told(loop: Any) -> None:
    """Three requests of one connection; the client goes away between two of them."""

    async def scenario() -> None:
        async with watching() as (app, connect):
            reader, writer = await connect()
            app.may_answer.set()
            for _ in range(3):
                writer.write(request(1000))
                assert (await reader.readuntil(b"ok")).endswith(b"\r\n\r\nok")
            writer.close()
            await asyncio.sleep(0.1)
            assert (app.there, app.told) == ([True] * 3, 0)

    run(scenario, loop)


@LOOPS
def test_a_client_that_went_away_before_is_not_there(loop: Any) -> None:
    async def scenario() -> None:
        async with watching() as (app, connect):
            app.may_watch.clear()
            _, writer = await connect()
            writer.write(request(1000))
            await asyncio.sleep(0.1)
            writer.close()
            await asyncio.sleep(0.1)
            app.may_answer.set()
            app.may_watch.set()
            await app.began.wait()
            assert (app.there, app.told) == ([False], 0)

    run(scenario, loop)
