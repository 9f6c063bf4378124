"""Bodies that go from the connection into the application's memory, over real sockets and over TLS."""

from __future__ import annotations

import asyncio
import errno
import gc
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from exportkit.serve.http.asgi import make_app
from exportkit.serve.http.exchange import FILL, HttpOptions
from exportkit.serve.operations import body_filling
from exportkit.serve.operations.connection_limits import ConnectionLimits
from exportkit.serve.request_record import RequestRecord
from tests.serve.http.conftest import repository
from tests.serve.operations import limited_server
from tests.serve.operations.certificates import make_certificates
from tests.serve.operations.limited_server import LOOPS, Connect, run, serving_app

LIMITS = ConnectionLimits(header_seconds=600.0, idle_seconds=600.0)


class Echo:
    """Fills memory with the body and answers with it. At `/patient`, it lets ASGI's messages do that after a while."""

    def __init__(self) -> None:
        self.parts: list[int] = []
        self.ended: list[bool] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def __call__(self, scope: dict[str, Any], receive: Callable[[], Awaitable[Any]], send: Any) -> None:
        headers = dict(scope["headers"])
        memory = memoryview(bytearray(int(headers.get(b"content-length", b"0"))))
        self.parts = []
        filling = asyncio.ensure_future(scope["extensions"][FILL](memory, self.parts.append))
        if scope["path"] == "/patient":
            await asyncio.wait([filling], timeout=0.1)
            filling.cancel()
            await asyncio.wait([filling])
            came, more = sum(self.parts), True
            body = b""
            while more:
                message = await receive()
                body += message["body"]
                more = message["more_body"]
            start = len(memory) - len(body)
            assert start <= came  # what came before the filling began is in the memory, the rest comes again
            memory[start:] = body
        else:
            self.ended.append(await filling)
            if not self.ended[-1]:
                return
        await self.may_answer.wait()
        length = b"%d" % len(memory)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]})
        await send({"type": "http.response.body", "body": memory})


@asynccontextmanager
async def serving(
    tls: ssl.SSLContext | None = None, trust: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[Echo, Connect]]:
    app = Echo()
    async with serving_app(app, LIMITS, tls=tls, trust=trust) as connect:
        yield app, connect


def request(body: bytes, path: bytes = b"/", more: bytes = b"") -> bytes:
    return b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n%s\r\n" % (path, len(body), more) + body


async def answer(reader: asyncio.StreamReader) -> bytes:
    status, body = await limited_server.answer(reader)
    assert status == 200, body
    return body


def counted(size: int, seed: int) -> bytes:
    """Bytes of which no part is like another."""
    return (np.arange(size // 8 + 1, dtype=">u8") + seed * 10**9).tobytes()[:size]


@LOOPS
@settings(max_examples=8)
@given(
    sizes=st.lists(st.sampled_from([0, 1, 7, 16_384, 65_536, 300_000, 9 << 20]), min_size=1, max_size=4),
    cuts=st.lists(st.integers(1, 400_000) | st.integers(1, 9 << 20), max_size=5),
)
def test_every_body_arrives_however_it_is_cut(loop: Any, sizes: list[int], cuts: list[int]) -> None:
    """Requests follow one another on a connection without a pause, and are sent in any pieces."""
    bodies = [counted(size, index) for index, size in enumerate(sizes)]

    async def scenario() -> None:
        async with serving() as (_, connect):
            reader, writer = await connect()
            answers = asyncio.create_task(all_answers(reader, len(bodies)))
            stream = b"".join(map(request, bodies))
            for cut in cuts:
                writer.write(stream[:cut])
                stream = stream[cut:]
                await writer.drain()
                await asyncio.sleep(0.001)
            writer.write(stream)
            assert await answers == bodies

    run(scenario, loop)


async def all_answers(reader: asyncio.StreamReader, count: int) -> list[bytes]:
    return [await answer(reader) for _ in range(count)]


@LOOPS
def test_what_follows_a_body_is_not_read_into_it(loop: Any) -> None:
    """While a request is answered, the next one waits, whole or in part."""

    async def scenario() -> None:
        async with serving() as (app, connect):
            reader, writer = await connect()
            app.may_answer.clear()
            first, second = counted(1 << 20, 1), counted(1 << 20, 2)
            writer.write(request(first))
            await asyncio.sleep(0.1)
            writer.write(request(second)[:1000])
            await asyncio.sleep(0.05)
            app.may_answer.set()
            assert await answer(reader) == first
            writer.write(request(second)[1000:])
            assert await answer(reader) == second

    run(scenario, loop)


@LOOPS
def test_a_client_that_goes_away_in_the_middle(loop: Any) -> None:
    async def scenario() -> None:
        async with serving() as (app, connect):
            _, writer = await connect()
            writer.write(request(counted(1 << 20, 1))[:500_000])
            await asyncio.sleep(0.1)
            writer.transport.abort()
            while not app.ended:
                await asyncio.sleep(0.01)
            assert app.ended == [False]
            reader, writer = await connect()
            writer.write(request(b"another"))
            assert await answer(reader) == b"another"

    run(scenario, loop)


@LOOPS
@pytest.mark.parametrize("sent", [0, 10, 300_000])
def test_filling_that_is_cancelled_goes_on_as_messages(loop: Any, sent: int) -> None:
    """Nothing of the body is lost, and the connection serves the next request."""

    async def scenario() -> None:
        async with serving() as (_, connect):
            reader, writer = await connect()
            body = counted(1 << 20, 3)
            whole = request(body, b"/patient")
            start = whole.index(b"\r\n\r\n") + 4 + sent
            writer.write(whole[:start])
            await asyncio.sleep(0.3)
            writer.write(whole[start:])
            assert await answer(reader) == body
            writer.write(request(b"the next"))
            assert await answer(reader) == b"the next"

    run(scenario, loop)


class Elsewhere:
    """Stands before the function that receives in another thread, which waits until it may."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.threads: list[str] = []
        self.may_receive = threading.Event()
        self._receive = body_filling._receive
        monkeypatch.setattr(body_filling, "_receive", self.receive)

    def receive(self, descriptor: int, body: Any) -> int:
        self.threads.append(threading.current_thread().name)
        assert self.may_receive.wait(60)
        return self._receive(descriptor, body)

    async def begun(self) -> None:
        while not self.threads:
            await asyncio.sleep(0.01)


LARGE = 16 << 20


@LOOPS
def test_large_bodies_come_in_other_threads_at_the_same_time(loop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = Elsewhere(monkeypatch)
    bodies = [counted(LARGE, seed) for seed in range(3)]

    async def scenario() -> None:
        async with serving() as (_, connect):
            answers = []
            for body in bodies:
                reader, writer = await connect()
                writer.write(request(body))
                answers.append(asyncio.create_task(read_large(reader)))
            while len(elsewhere.threads) < len(bodies):
                await asyncio.sleep(0.01)
            elsewhere.may_receive.set()
            assert await asyncio.gather(*answers) == bodies
            assert threading.current_thread().name not in elsewhere.threads

    run(scenario, loop)


async def read_large(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), head
    return await reader.readexactly(LARGE)


@LOOPS
def test_filling_that_is_cancelled_while_another_thread_receives(loop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = Elsewhere(monkeypatch)
    body = counted(LARGE, 5)

    async def scenario() -> None:
        async with serving() as (_, connect):
            reader, writer = await connect()
            writer.write(request(body, b"/patient"))
            await elsewhere.begun()
            await asyncio.sleep(0.2)  # the application waits for 0.1 s
            elsewhere.may_receive.set()
            assert await read_large(reader) == body
            writer.write(request(b"the next"))
            assert await answer(reader) == b"the next"

    run(scenario, loop)


@LOOPS
def test_a_client_that_goes_away_while_another_thread_receives(loop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are served meanwhile, and the application is told once the thread comes back."""
    elsewhere = Elsewhere(monkeypatch)

    async def scenario() -> None:
        async with serving() as (app, connect):
            _, writer = await connect()
            writer.write(request(counted(LARGE, 1)))
            await elsewhere.begun()
            writer.transport.abort()
            reader, writer = await connect()
            writer.write(request(b"another"))
            assert await answer(reader) == b"another"
            elsewhere.may_receive.set()
            while len(app.ended) < 2:
                await asyncio.sleep(0.01)
            assert app.ended == [True, False]

    run(scenario, loop)


def test_large_bodies_come_without_another_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere, asked = Elsewhere(monkeypatch), []

    def refuse(descriptor: int) -> int:
        asked.append(descriptor)
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(body_filling.os, "dup", refuse)
    body = counted(LARGE, 7)

    async def scenario() -> None:
        async with serving() as (_, connect):
            reader, writer = await connect()
            writer.write(request(body))
            assert await read_large(reader) == body

    run(scenario, uvloop.new_event_loop)
    assert asked
    assert not elsewhere.threads


@LOOPS
def test_a_client_that_pauses_does_not_keep_a_thread(loop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = Elsewhere(monkeypatch)
    elsewhere.may_receive.set()
    body = counted(LARGE, 2)

    async def scenario() -> None:
        async with serving() as (app, connect):
            reader, writer = await connect()
            writer.write(request(body)[: LARGE // 2])
            await elsewhere.begun()
            while sum(app.parts) < LARGE // 2 - 1000:
                await asyncio.sleep(0.01)
            await asyncio.wait_for(asyncio.get_running_loop().run_in_executor(None, lambda: None), 60)
            began = len(elsewhere.threads)
            await asyncio.sleep(0.3)
            assert len(elsewhere.threads) == began
            writer.write(request(body)[LARGE // 2 :])
            assert await read_large(reader) == body

    run(scenario, loop)


def test_who_asks_before_it_sends_is_told_to_go_on() -> None:
    async def scenario() -> None:
        async with serving() as (_, connect):
            reader, writer = await connect()
            body = counted(300_000, 4)
            head, _, _ = request(body, more=b"expect: 100-continue\r\n").partition(body)
            writer.write(head)
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(body)
            assert await answer(reader) == body

    run(scenario)


@LOOPS
def test_over_tls(loop: Any, tmp_path: Path) -> None:
    files = make_certificates(tmp_path)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(files / "server.pem", files / "server.key")
    trust = ssl.create_default_context(cafile=str(files / "authority.pem"))

    async def scenario() -> None:
        async with serving(tls, trust) as (app, connect):
            reader, writer = await connect()
            for seed in range(3):
                body = counted(1 << 20, seed)
                writer.write(request(body))
                assert await answer(reader) == body
            assert sum(app.parts) == 1 << 20

    run(scenario, loop)


def test_a_request_leaves_nothing_that_python_must_look_for() -> None:
    """Circles would keep each request until Python looks for them, which takes time from others."""
    app = make_app(repository(), HttpOptions())
    json = b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [2], "data": [1, 2]}]}'

    async def scenario() -> None:
        async with serving_app(app, LIMITS) as connect:
            reader, writer = await connect()
            for body, status in [(json, b"200"), (json[:-1] + b"x", b"400")] * 5:
                writer.write(request(body, b"/v2/models/echo/infer"))
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.split()[1] == status, head
                await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split()[0]))
            assert len(records()) - len(others) <= 1  # the connection knows its last request

    def records() -> list[RequestRecord]:
        return [each for each in gc.get_objects() if type(each) is RequestRecord]

    gc.collect()
    gc.disable()
    others = records()  # of other tests' servers
    try:
        run(scenario)
    finally:
        gc.enable()
