"""The limits of HTTP connections, over real sockets, with an application that needs no model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from exportkit.serve.operations.connection_limits import ConnectionLimits
from exportkit.serve.statuses import ServeError
from tests.serve.operations.limited_server import Connect, answer, refusal, run, serving_app

SHORT = ConnectionLimits(connections=3, header_bytes=2000, header_seconds=0.3, idle_seconds=0.3)


class Echo:
    """Reads a body, and answers with its size and as many bytes as the URL says. Does not read it at `/refuse`."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def __call__(self, scope: dict[str, Any], receive: Callable[[], Awaitable[Any]], send: Any) -> None:
        if scope["path"] == "/refuse":
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
            await send({"type": "http.response.body", "body": b"no"})
            return
        size, message = 0, {"more_body": True}
        while message.get("more_body"):
            message = await receive()
            if message["type"] == "http.disconnect":
                self.events.append("disconnect")
                return
            size += len(message["body"])
        await self.may_answer.wait()
        answer = b"%d" % size + b"x" * int(scope["path"][1:] or 0)
        await send(
            {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(answer))]}
        )
        await send({"type": "http.response.body", "body": answer})
        self.events.append("answered")


@asynccontextmanager
async def serving(limits: ConnectionLimits) -> AsyncIterator[tuple[Echo, list[int], Connect]]:
    app, refused = Echo(), []

    def note(client: str, error: ServeError) -> None:
        assert client == "127.0.0.1"
        refused.append(error.status)

    async with serving_app(app, limits, note) as connect:
        try:
            yield app, refused, connect
        finally:
            app.may_answer.set()


def test_what_keeps_to_the_limits_is_answered_on_one_connection():
    async def scenario() -> None:
        async with serving(SHORT) as (_, refused, connect):
            reader, writer = await connect()
            for size in (0, 5, 300_000):
                writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % size)
                writer.write(b"x" * size)
                assert await answer(reader) == (200, b"%d" % size)
                await asyncio.sleep(0.4)  # keep-alive has a limit of its own, which is longer
            assert refused == []

    run(scenario)


def test_one_connection_too_many_is_told_to_come_again():
    async def scenario() -> None:
        async with serving(SHORT) as (_, refused, connect):
            open_ones = [await connect() for _ in range(3)]
            for _, writer in open_ones:
                writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            for reader, _ in open_ones:
                await answer(reader)
            reader, _ = await connect()
            assert await refusal(reader) == (503, "3 connections are open, which is the most")
            open_ones[0][1].close()
            await asyncio.sleep(0.05)
            reader, writer = await connect()
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await answer(reader))[0] == 200
            assert refused == [503]

    run(scenario)


def test_headers_without_an_end_are_refused():
    async def scenario() -> None:
        async with serving(SHORT) as (_, refused, connect):
            for headers in (b"x: " + b"y" * 3000, b"x: y\r\n" * 500):
                reader, writer = await connect()
                writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n" + headers)
                assert await refusal(reader) == (431, "the headers have more than 2000 bytes")
            assert refused == [431, 431]

    run(scenario)


def test_headers_that_trickle_are_refused_and_silence_is_closed():
    async def scenario() -> None:
        async with serving(SHORT) as (_, refused, connect):
            silent, _ = await connect()
            reader, writer = await connect()

            async def trickle() -> None:
                for byte in b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 1000:
                    writer.write(bytes([byte]))
                    await asyncio.sleep(0.1)  # the second byte after the refusal would make this client forget it

            slow = asyncio.create_task(trickle())
            assert await refusal(reader) == (408, "the headers took longer than 0.3 seconds")
            slow.cancel()
            assert await silent.read() == b""
            assert refused == [408]

    run(scenario)


def test_the_rest_of_a_body_that_was_refused_is_not_waited_for():
    async def scenario() -> None:
        async with serving(SHORT) as (_, refused, connect):
            reader, writer = await connect()
            writer.write(b"POST /refuse HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n")
            assert await answer(reader) == (200, b"no")
            for _ in range(4):
                writer.write(b"x")
                await asyncio.sleep(0.2)  # it comes, and is thrown away
            assert not reader.at_eof()
            assert await reader.read() == b""
            assert refused == []

    run(scenario)


def test_a_model_that_takes_long_is_not_the_clients_fault():
    async def scenario() -> None:
        async with serving(SHORT) as (app, refused, connect):
            app.may_answer.clear()
            reader, writer = await connect()
            writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\nxx")
            writer.write(b"GET / HTTP/1.1\r\n")  # the next one has begun
            await asyncio.sleep(0.8)
            app.may_answer.set()
            assert await answer(reader) == (200, b"2")
            assert (await refusal(reader))[0] == 408
            assert refused == [408]

    run(scenario)


def test_a_client_that_does_not_take_its_answer_is_cut_off():
    async def scenario() -> None:
        async with serving(SHORT) as (app, _, connect):
            reader, writer = await connect()
            reader._transport.pause_reading()
            writer.write(b"GET /50000000 HTTP/1.1\r\nhost: x\r\n\r\n")
            while "answered" not in app.events:
                await asyncio.sleep(0.05)
            await asyncio.sleep(1.0)
            reader._transport.resume_reading()
            try:
                received = len(await reader.read(-1))
            except ConnectionResetError:
                received = 0
            assert received < 50_000_000

    run(scenario)


def test_what_is_not_http_is_refused_in_json():
    async def scenario() -> None:
        async with serving(SHORT) as (_, refused, connect):
            for garbage in (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"A B C D\r\n\r\n"):
                reader, writer = await connect()
                writer.write(garbage)
                assert await refusal(reader) == (400, "the request is not HTTP/1.1")
            assert refused == [400] * 3

    run(scenario)
