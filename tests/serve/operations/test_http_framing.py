"""What a server of HTTP/1.1 understands and sends: bytes cut anywhere, heads and bodies with limits, answers whole."""

from __future__ import annotations

import asyncio
import itertools
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exportkit.serve.operations.asgi_request import HeadFirst
from exportkit.serve.operations.connection_limits import ConnectionLimits
from exportkit.serve.statuses import ServeError
from tests.serve.operations.certificates import make_certificates
from tests.serve.operations.limited_server import HOST, LOOPS, Connect, answer, refusal, run, serving_app

LIMITS = ConnectionLimits(connections=3, header_bytes=2000, header_seconds=0.5, idle_seconds=600.0)
CHUNKED = b"POST / " + HOST + b"transfer-encoding: chunked\r\n\r\n"


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the body, in chunks at `/chunks`; at `/broken` with a header that would be two."""
    body, message = b"", {"more_body": True}
    while message.get("more_body"):
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body += message["body"]
    headers = [] if scope["path"] == "/chunks" else [(b"content-length", b"%d" % len(body))]
    if scope["path"] == "/broken":
        headers.append((b"x", b"1\r\ny: 2"))
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    if scope["path"] == "/too-long":
        body += b"x"
    for start in range(0, len(body), 3):
        await send({"type": "http.response.body", "body": body[start : start + 3], "more_body": True})
    await send({"type": "http.response.body"})


@asynccontextmanager
async def serving(limits: ConnectionLimits = LIMITS, **tls: Any) -> AsyncIterator[tuple[list[ServeError], Connect]]:
    refused: list[ServeError] = []
    async with serving_app(echo, limits, lambda client, error: refused.append(error), **tls) as connect:
        yield refused, connect


# --- what comes -------------------------------------------------------------------------------------------------------


@LOOPS
def test_a_chunked_body_may_pause_anywhere(loop: Any) -> None:
    """All pairs of cuts, with a pause at each. A part that has framing alone keeps nobody waiting for ever."""
    stream = b"5;a=b\r\n{   }\r\n1\r\n!\r\n0\r\nx: y\r\n\r\n"

    async def scenario() -> None:
        limits = ConnectionLimits(connections=2000, header_seconds=600.0)
        async with serving(limits) as (_, connect):

            async def cut(*places: int) -> None:
                reader, writer = await connect()
                writer.write(CHUNKED)
                for start, end in itertools.pairwise((0, *places, len(stream))):
                    await asyncio.sleep(0.1)
                    writer.write(stream[start:end])
                assert await asyncio.wait_for(answer(reader), 60) == (200, b"{   }!"), places
                writer.close()

            pairs = list(itertools.combinations(range(1, len(stream)), 2))
            for start in range(0, len(pairs), 200):
                await asyncio.gather(*(cut(*pair) for pair in pairs[start : start + 200]))

    run(scenario, loop)


def test_framing_without_data_is_refused() -> None:
    """Extensions and trailers cost nothing to send, and have no use here."""

    async def scenario() -> None:
        async with serving() as (_, connect):
            for flood in (b"1;" + b"x" * 200_000, b"1\r\n!\r\n0\r\n" + b"x: y\r\n" * 40_000):
                reader, writer = await connect()
                writer.write(CHUNKED)
                await asyncio.sleep(0.1)
                writer.write(flood)
                assert (await answer(reader))[0] == 400
            reader, writer = await connect()
            writer.write(CHUNKED + b"1\r\nx\r\n" * 100_000 + b"0\r\n\r\n")  # small chunks are slow, and allowed
            assert await answer(reader) == (200, b"x" * 100_000)

    run(scenario)


@LOOPS
@pytest.mark.parametrize("size", [2000, 2001])
@pytest.mark.parametrize("step", [1500, 2001, 10_000])
def test_headers_have_exactly_as_many_bytes_as_they_may(loop: Any, size: int, step: int) -> None:
    async def scenario() -> None:
        async with serving() as (refused, connect):
            head = b"GET / " + HOST + b"x: "
            request = head + b"y" * (size - len(head) - 4) + b"\r\n\r\n"
            assert len(request) == size
            reader, writer = await connect()
            for start in range(0, size, step):
                writer.write(request[start : start + step])
                await asyncio.sleep(0.05)
            assert (await answer(reader))[0] == (200 if size <= 2000 else 431)
            assert len(refused) == (size > 2000)

    run(scenario, loop)


def test_headers_behind_a_request_have_a_limit_too() -> None:
    async def scenario() -> None:
        async with serving() as (_, connect):
            reader, writer = await connect()
            writer.write(b"GET / " + HOST + b"\r\nGET / " + HOST + b"x: y\r\n" * 400 + b"\r\n")
            assert await answer(reader) == (200, b"")
            assert (await refusal(reader))[0] == 431

    run(scenario)


@pytest.mark.parametrize(
    "garbage",
    [b"GET /\r\n\r\n", b"GET / HTTP/2.0\r\nhost: x\r\n\r\n", b"CONNECT a:1 " + HOST + b"\r\n", b"\x16\x03\x01\r\n\r\n"],
)
def test_what_was_asked_before_is_answered_before_a_refusal(garbage: bytes) -> None:
    async def scenario() -> None:
        async with serving() as (refused, connect):
            reader, writer = await connect()
            writer.write(b"POST / " + HOST + b"content-length: 2\r\n\r\nhi" + garbage)
            assert await answer(reader) == (200, b"hi")
            assert await refusal(reader) == (400, "the request is not HTTP/1.1")
            assert len(refused) == 1

    run(scenario)


def test_requests_that_do_not_wait_are_answered_in_order() -> None:
    async def scenario() -> None:
        async with serving() as (_, connect):
            reader, writer = await connect()
            bodies = [b"%d" % number * number for number in range(40)]
            for body in bodies:
                writer.write(b"POST / " + HOST + b"content-length: %d\r\n\r\n" % len(body) + body)
            assert [await answer(reader) for _ in bodies] == [(200, body) for body in bodies]

    run(scenario)


def test_a_client_that_offers_another_protocol_is_answered_in_this_one() -> None:
    async def scenario() -> None:
        async with serving() as (_, connect):
            reader, writer = await connect()
            offer = HOST + b"connection: upgrade\r\nupgrade: h2c\r\n"
            for _ in range(2):
                writer.write(b"GET / " + offer + b"\r\n")
                assert await answer(reader) == (200, b"")
            writer.write(b"POST / " + offer + b"content-length: 2\r\n\r\nhi")
            assert (await refusal(reader))[1].endswith("Send no header Upgrade.")

    run(scenario)


# --- what is sent -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [b"/broken", b"/too-long"])
def test_an_answer_that_would_be_two_is_not_sent(path: bytes) -> None:
    async def scenario() -> None:
        async with serving() as (_, connect):
            reader, writer = await connect()
            writer.write(b"POST %b " % path + HOST + b"content-length: 2\r\n\r\nhi")
            sent = await reader.read()
            assert b"y: 2" not in sent
            assert not sent.endswith(b"hix")

    run(scenario)


@pytest.mark.parametrize(("version", "end"), [(b"1.1", b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"), (b"1.0", b"abcde")])
def test_an_answer_of_unknown_size_comes_in_chunks_where_the_client_knows_them(version: bytes, end: bytes) -> None:
    async def scenario() -> None:
        async with serving() as (_, connect):
            reader, writer = await connect()
            head = b"POST /chunks HTTP/%b\r\nhost: x\r\nconnection: close\r\ncontent-length: 5\r\n\r\nabcde"
            writer.write(head % version)
            assert (await reader.read()).partition(b"\r\n\r\n")[2] == end

    run(scenario)


class Wire:
    """A transport that keeps what each call sent."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def write(self, data: Any) -> None:
        self.sent.append(bytes(data))

    def writelines(self, parts: Any) -> None:
        self.write(b"".join(parts))


def written(parts: list[bytes], ticks: set[int]) -> list[bytes]:
    """Writes a head and parts; the event loop ticks before those parts whose numbers are in `ticks`."""
    wire: Any = Wire()

    async def write() -> None:
        writer = HeadFirst(wire, b"head")
        for number, part in enumerate(parts):
            if number in ticks:
                await asyncio.sleep(0)
            writer.write(memoryview(part))
        await asyncio.sleep(0)

    asyncio.run(write())
    return wire.sent


@given(st.lists(st.binary(max_size=30), max_size=6), st.sets(st.integers(0, 5)))
def test_all_arrives_in_order(parts: list[bytes], ticks: set[int]) -> None:
    assert b"".join(written(parts, ticks)) == b"head" + b"".join(parts)


@pytest.mark.parametrize("size", [1, 64 << 10, (64 << 10) + 1, 1 << 20])
def test_the_head_is_sent_with_the_body_and_waits_for_one_tick_only(size: int) -> None:
    assert written([b"", bytes(size), b"more"], set()) == [b"head" + bytes(size), b"more"]
    assert written([bytes(size)], {0}) == [b"head", bytes(size)]


# --- connections of TLS -----------------------------------------------------------------------------------------------


@LOOPS
def test_connections_that_never_begin_their_handshake_count_and_are_closed(loop: Any, tmp_path: Path) -> None:
    files = make_certificates(tmp_path)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(files / "server.pem", files / "server.key")
    trust = ssl.create_default_context(cafile=str(files / "authority.pem"))

    async def scenario() -> None:
        async with serving(tls=tls, trust=trust) as (refused, connect):
            silent = [await connect(silent=True) for _ in range(3)]
            await asyncio.sleep(0.1)
            beyond, _ = await connect(silent=True)
            with suppress(ConnectionResetError):
                assert await asyncio.wait_for(beyond.read(), 0.3) == b""  # at once, and before any handshake
            assert [error.status for error in refused] == [503]
            for reader, _ in silent:
                with suppress(ConnectionResetError):
                    await asyncio.wait_for(reader.read(), 60)
            reader, writer = await connect()
            writer.write(b"GET / " + HOST + b"\r\n")
            assert (await answer(reader))[0] == 200

    run(scenario, loop)
