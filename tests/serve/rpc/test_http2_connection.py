"""HTTP/2 below gRPC: what a client breaks ends its call or its connection, and what it asks for is bounded."""

from __future__ import annotations

import asyncio
import random
import time
import zlib
from collections.abc import Iterator

import pytest

from exportkit.serve.rpc import grpc_server, http2_connection
from exportkit.serve.rpc import http2_frames as h2
from exportkit.serve.rpc.http2_frames import ErrorCode
from tests.serve.rpc.echo_models import EchoModel, EchoRepository
from tests.serve.rpc.raw_http2 import INFER, READY, STREAM, RawClient, head, prefixed
from tests.serve.rpc.serving_echo import Served, served
from tests.serve.rpc.test_grpc_server import request

OPEN = h2.frame(h2.HEADERS, h2.END_HEADERS, 1, head())


@pytest.fixture
def client(echo: Served) -> Iterator[RawClient]:
    with RawClient(echo.server.port) as client:
        yield client


def data(message: bytes, number: int = 1, *, end: bool = True) -> bytes:
    return h2.frame(h2.DATA, h2.END_STREAM * end, number, message)


# --- what is right ----------------------------------------------------------------------------------------------------


def cut(whole: bytes, size: int) -> list[bytes]:
    return [whole[at : at + size] for at in range(0, len(whole), size)]


@pytest.mark.parametrize("size", [1, 2, 5, 9, 14])
def test_frames_and_messages_may_be_cut_anywhere(echo: Served, size: int):
    message = prefixed(request(20))
    parts = [data(part, end=False) for part in cut(message, size)]
    with RawClient(echo.server.port, greet=False) as client:
        whole = h2.PREFACE + h2.settings([]) + OPEN + b"".join(parts) + data(b"")
        for part in cut(whole, size):
            client.send(part)
        answer = client.until(h2.DATA)
        assert answer.payload[5:].endswith(bytes(20))
        assert client.trailers(1)["grpc-status"] == "0"


def test_padding_priorities_and_unknown_frames_are_nothing(client: RawClient):
    block = head()
    half = len(block) // 2
    flags = h2.PADDED | h2.HAS_PRIORITY
    client.send(h2.frame(h2.HEADERS, flags, 1, b"\3" + b"\0\0\0\0\7" + block[:half] + b"pad"))
    client.send(h2.frame(h2.CONTINUATION, h2.END_HEADERS, 1, block[half:]))
    client.send(h2.frame(0x77, 0, 1, b"whatever") + h2.frame(h2.PRIORITY, 0, 1, bytes(5)))
    client.send(h2.frame(h2.DATA, h2.PADDED | h2.END_STREAM, 1, b"\2" + prefixed(request()) + b"12"))
    assert client.trailers(1)["grpc-status"] == "0"


def test_several_messages_of_a_stream_may_share_a_frame(client: RawClient):
    client.call(1, STREAM)
    client.send(data(prefixed(request(1)) + prefixed(request(2)) + prefixed(request(3))))
    answers = [client.until(h2.DATA).payload for _ in range(3)]
    assert [answer[-1 - n :] for n, answer in enumerate(answers)] == [bytes(1), bytes(2), bytes(3)]
    assert client.trailers(1)["grpc-status"] == "0"


# --- calls that are refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (head(method="GET"), (":status", "405")),
        (head(kind="application/json"), (":status", "415")),
        (head(INFER, ("grpc-timeout", "1")), ("grpc-status", "3")),
        (head(INFER, ("grpc-timeout", "123456789S")), ("grpc-status", "3")),
        (head(INFER, ("grpc-encoding", "br")), ("grpc-status", "12")),
        (head(INFER, ("x-bin", "!")), ("grpc-status", "3")),
        (head("/nothing"), ("grpc-status", "12")),
    ],
)
def test_a_call_that_cannot_be_answered(client: RawClient, block: bytes, expected: tuple[str, str]):
    client.send(h2.frame(h2.HEADERS, h2.END_HEADERS | h2.END_STREAM, 1, block))
    assert client.trailers(1)[expected[0]] == expected[1]
    assert client.is_open()


@pytest.mark.parametrize(
    ("encoding", "payload", "status"),
    [
        ("identity", prefixed(b"", 1), "13"),
        ("gzip", prefixed(b"no gzip", 1), "13"),
        ("deflate", prefixed(zlib.compress(request())[:-3], 1), "13"),
        ("deflate", prefixed(zlib.compress(request()) + b"more", 1), "13"),
        ("deflate", prefixed(zlib.compress(request()), 2), "13"),
        ("deflate", prefixed(zlib.compress(request()), 1), "0"),
        ("gzip", prefixed(request(), 0), "0"),
        ("identity", prefixed(request())[:-1], "13"),
        ("identity", b"\0\0", "13"),
    ],
)
def test_messages_that_are_compressed_or_not_complete(client: RawClient, encoding: str, payload: bytes, status: str):
    client.send(h2.frame(h2.HEADERS, h2.END_HEADERS, 1, head(INFER, ("grpc-encoding", encoding))) + data(payload))
    assert client.trailers(1)["grpc-status"] == status


def test_a_message_that_is_too_large_is_refused_from_its_beginning(client: RawClient):
    client.send(OPEN + data(b"\0\x7f\xff\xff\xff", end=False))
    assert client.trailers(1)["grpc-status"] == "8"
    assert client.until(h2.RST_STREAM, 1).payload == bytes(4)  # no error, but send no more
    client.send(data(bytes(1000), end=False))  # what was on its way
    assert client.is_open()


# --- what ends a connection -------------------------------------------------------------------------------------------

BROKEN = {
    "a large frame": (h2.frame(h2.DATA, 0, 1, bytes(h2.MOST_FRAME + 1)), ErrorCode.FRAME_SIZE),
    "data of no stream": (h2.frame(h2.DATA, 0, 7, b"x"), ErrorCode.PROTOCOL),
    "other frames within headers": (h2.frame(h2.HEADERS, 0, 1) + h2.window_update(0, 1), ErrorCode.PROTOCOL),
    "a continuation of others": (h2.frame(h2.HEADERS, 0, 1) + h2.frame(h2.CONTINUATION, 0, 3), ErrorCode.PROTOCOL),
    "padding of nothing": (OPEN + h2.frame(h2.DATA, h2.PADDED, 1), ErrorCode.PROTOCOL),
    "short priorities": (h2.frame(h2.HEADERS, h2.HAS_PRIORITY, 1, b"abc"), ErrorCode.FRAME_SIZE),
    "no HPACK": (h2.frame(h2.HEADERS, h2.END_HEADERS, 1, b"\xff\xff\xff\xff\xff\xff"), ErrorCode.COMPRESSION),
    "a table beyond its size": (h2.frame(h2.HEADERS, h2.END_HEADERS, 1, b"\x3f\xff\xff\x03"), ErrorCode.COMPRESSION),
    "long headers": (
        h2.frame(h2.HEADERS, 0, 1, bytes(16000)) + 5 * h2.frame(h2.CONTINUATION, 0, 1, bytes(16000)),
        ErrorCode.TOO_MUCH,
    ),
    # A field of 4,000 bytes is put into the table once, and then is one byte.
    "a bomb of headers": (
        h2.frame(h2.HEADERS, h2.END_HEADERS, 1, b"\x40\1x\x7f\xa1\x1e" + bytes(4000) + b"\xbe" * 1000),
        ErrorCode.TOO_MUCH,
    ),
}  # fmt: skip
FLOODS = {
    "pings": h2.frame(h2.PING, payload=bytes(8)),
    "settings": h2.settings([(h2.INITIAL_WINDOW_SIZE, 1000)]),
    "windows": h2.window_update(0, 1),
    "priorities": h2.frame(h2.PRIORITY, 0, 1, bytes(5)),
    "empty data": data(b"", end=False),
    "resets of nothing": h2.reset(1, ErrorCode.CANCEL),
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_breaks_the_protocol_ends_the_connection(echo: Served, client: RawClient, what: str):
    sent, problem = BROKEN[what]
    client.send(sent)
    assert client.ended() == problem
    with RawClient(echo.server.port) as other:
        assert other.is_open()
    echo.until(lambda: not echo.server._setup.tasks)


@pytest.mark.parametrize("what", FLOODS)
def test_a_flood_of_frames_ends_the_connection(client: RawClient, what: str):
    client.send((OPEN if what in ("empty data", "resets of nothing") else b"") + FLOODS[what] * 10_001)
    assert client.ended() == ErrorCode.TOO_MUCH


def test_a_flood_of_continuations_ends_the_connection(client: RawClient):
    client.send(h2.frame(h2.HEADERS, 0, 1, b"") + h2.frame(h2.CONTINUATION, 0, 1) * 10_001)
    assert client.ended() == ErrorCode.TOO_MUCH


def test_calls_that_are_given_up_at_once_end_the_connection(echo: Served, client: RawClient):
    block = h2.frame(h2.HEADERS, h2.END_HEADERS, 1, head())
    for number in range(1, 2004, 2):
        client.send(block[:5] + number.to_bytes(4, "big") + block[9:] + h2.reset(number, ErrorCode.CANCEL))
    assert client.ended() == ErrorCode.TOO_MUCH
    echo.until(lambda: not echo.server._setup.tasks)


def test_more_data_than_was_allowed_ends_its_call(echo: Served, client: RawClient):
    echo.call(echo.model.gate.clear)
    client.call(1, STREAM)
    message = prefixed(request(16000))
    for _ in range(1000):  # of which the server takes some hundred
        client.send(data(message[:16000], end=False) + data(message[16000:], end=False))
    assert client.trailers(1)["grpc-status"] == "8"
    echo.until(lambda: echo.model.running == 0)


def test_http_1_is_told_to_go(echo: Served):
    with RawClient(echo.server.port, greet=False) as client:
        client.send(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert client.ended() == ErrorCode.PROTOCOL


def test_more_calls_than_allowed_are_refused_alone(echo: Served, client: RawClient):
    echo.call(echo.model.gate.clear)
    for number in range(1, 2 * 257, 2):
        client.call(number, INFER, request())
    refused = client.until(h2.RST_STREAM)
    assert (refused.stream, refused.payload[-1]) == (513, ErrorCode.REFUSED_STREAM)
    echo.call(echo.model.gate.set)
    assert client.trailers(511)["grpc-status"] == "0"


# --- windows and slow clients -----------------------------------------------------------------------------------------


def test_an_answer_waits_for_the_windows_of_its_client(echo: Served):
    with RawClient(echo.server.port, [(h2.INITIAL_WINDOW_SIZE, 10)]) as client:
        client.call(1, INFER, request(100))
        found = client.until(h2.DATA).payload
        assert len(found) == 10
        client.send(h2.window_update(1, 5))
        found += client.until(h2.DATA).payload
        assert len(found) == 15
        client.send(h2.settings([(h2.INITIAL_WINDOW_SIZE, 1 << 20)]))
        found += client.until(h2.DATA).payload
        assert len(found) == 5 + int.from_bytes(found[1:5], "big")
        assert client.trailers(1)["grpc-status"] == "0"


def test_answers_share_the_window_of_their_connection(echo: Served):
    size = 40_000
    with RawClient(echo.server.port, [(h2.INITIAL_WINDOW_SIZE, 1 << 30)]) as client:
        for number in (1, 3, 5):
            client.call(number, INFER, request(size))
        came, ended, allowed = 0, 0, (1 << 16) - 1
        for frame in client.frames():
            came += len(frame.payload) if frame.kind == h2.DATA else 0
            assert came <= allowed
            if came == allowed:
                allowed += 5000
                client.send(h2.window_update(0, 5000))
            ended += frame.kind == h2.HEADERS and bool(frame.flags & h2.END_STREAM)
            if ended == 3:
                break
        assert came > 3 * size


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes seconds takes a tenth."""
    for name in ("PREFACE_SECONDS", "IDLE_SECONDS", "PONG_SECONDS", "UNSENT_SECONDS", "MESSAGE_SECONDS"):
        monkeypatch.setattr(http2_connection, name, 0.3)
    monkeypatch.setattr(grpc_server, "LOOK_SECONDS", 0.02)


def test_who_takes_no_answer_is_cut_off(hasty: None, echo: Served):
    with RawClient(echo.server.port, [(h2.INITIAL_WINDOW_SIZE, 0)]) as client:
        client.call(1, INFER, request(100))
        for _ in range(20):
            client.send(h2.frame(h2.PING, payload=bytes(8)))  # it lives
            time.sleep(0.05)
        assert client.ended() is None
    echo.until(lambda: not echo.server._setup.tasks)


def test_who_reads_nothing_is_cut_off(hasty: None, echo: Served):
    with RawClient(echo.server.port, [(h2.INITIAL_WINDOW_SIZE, h2.MOST_WINDOW)]) as client:
        client.send(h2.window_update(0, 1 << 30))
        for number in range(1, 33, 2):
            client.call(number, INFER, request(2 << 20))
        echo.until(lambda: not echo.server._setup.opened)


def test_who_says_nothing_is_cut_off(hasty: None, echo: Served):
    with RawClient(echo.server.port, greet=False) as client:
        client.send(h2.PREFACE[:10])
        assert client.ended() is None


def test_who_is_silent_is_asked_whether_he_lives(hasty: None, client: RawClient):
    for _ in range(3):
        asked = client.until(h2.PING)
        client.send(h2.frame(h2.PING, h2.ACK, payload=asked.payload))
    client.until(h2.PING)  # which is not answered
    assert client.ended() is None


@pytest.mark.parametrize("sent", [b"", b"\0\0", prefixed(request(1000))[:500]])
def test_a_message_that_does_not_come_ends_its_call(hasty: None, client: RawClient, sent: bytes):
    client.send(OPEN + (data(sent, end=False) if sent else b""))
    for frame in client.frames():
        if frame.kind == h2.PING and not frame.flags & h2.ACK:
            client.send(h2.frame(h2.PING, h2.ACK, payload=frame.payload))
        if frame.kind == h2.HEADERS:
            break
    assert b"grpc-status\x014" in frame.payload


def test_messages_that_are_not_complete_have_one_limit(loop: asyncio.AbstractEventLoop):
    repository = EchoRepository(EchoModel(max_body=1))  # so that a message has at most 5 MiB, and all have 12
    part = h2.frame(h2.DATA, 0, 1, bytes(h2.MOST_FRAME))
    with served(loop, repository, max_held=12 << 20) as echo, RawClient(echo.server.port) as client:
        client.send(b"".join(client.opened(number) for number in (1, 3, 5)))
        for at in range(3 << 20 >> 14):
            for number in (1, 3, 5):
                begun = prefixed(bytes(5 << 20))[:5] if at == 0 else b""
                client.send(h2.frame(h2.DATA, 0, number, begun + part[9 + len(begun) :]))
        echo.until(lambda: echo.server._setup.held > 7 << 20)
        for _ in range(70):
            for number in (1, 3, 5):
                client.send(h2.frame(h2.DATA, 0, number, part[9:]))
        refused = client.until(h2.HEADERS)
        assert b"grpc-status\x018" in refused.payload
        assert client.is_open()
    echo.until(lambda: echo.server._setup.held == 0)


def test_who_takes_many_answers_may_say_so_often(client: RawClient):
    client.send(h2.settings([(h2.INITIAL_WINDOW_SIZE, h2.MOST_WINDOW)]) + h2.window_update(0, 1 << 30))
    for number in range(1, 41, 2):
        client.call(number, INFER, request(1 << 20))
        client.trailers(number)
    client.send(h2.window_update(0, 1) * 20_000)
    assert client.is_open()


# --- the end ----------------------------------------------------------------------------------------------------------


def test_the_end_is_told_and_what_runs_is_answered(echo: Served, client: RawClient):
    echo.call(echo.model.gate.clear)
    client.call(1, INFER, request())
    echo.until(lambda: echo.model.running == 1)
    stopping = echo.begin(echo.server.stop(60))
    told = client.until(h2.GOAWAY)
    assert told.payload == (1).to_bytes(4, "big") + bytes(4)
    client.call(3, INFER, request())
    assert client.until(h2.RST_STREAM, 3).payload[-1] == ErrorCode.REFUSED_STREAM
    echo.call(echo.model.gate.set)
    assert client.trailers(1)["grpc-status"] == "0"
    assert client.ended() is None
    stopping.result()


def test_random_frames_never_stop_the_server(echo: Served):
    chance = random.Random(1)
    blocks = [head(), head(STREAM), head(READY), b"", b"\x82\x84", chance.randbytes(20)]
    for _ in range(150):
        with RawClient(echo.server.port) as client:
            sent = b""
            for _ in range(chance.randrange(1, 12)):
                payload = chance.choice(
                    [*blocks, prefixed(request()), prefixed(b""), chance.randbytes(chance.randrange(9))]
                )
                flags = chance.choice([0, 1, 4, 5, 8, 0x20, chance.randrange(256)])
                sent += h2.frame(chance.randrange(11), flags, chance.choice([0, 1, 1, 1, 3, 5, 2]), payload)
            client.send(sent[: chance.choice([len(sent), chance.randrange(1, len(sent) + 1)])])
    with RawClient(echo.server.port) as client:
        client.call(1, INFER, request())
        assert client.trailers(1)["grpc-status"] == "0"
    echo.until(lambda: not echo.server._setup.tasks)
