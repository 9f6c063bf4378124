"""What RFC 9113 (HTTP/2) and RFC 7541 (HPACK) say that a server must do, section by section."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from exportkit.serve.rpc import http2_frames as h2
from exportkit.serve.rpc.http2_frames import ErrorCode
from tests.serve.rpc.raw_http2 import INFER, STREAM, RawClient, head, prefixed
from tests.serve.rpc.serving_echo import Served
from tests.serve.rpc.test_grpc_server import request

PAIRS = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", INFER),
    (":authority", "localhost"),
    ("content-type", "application/grpc"),
    ("te", "trailers"),
]
BOTH = h2.END_HEADERS | h2.END_STREAM


class Connection(NamedTuple):
    """The connection ends with this code."""

    code: ErrorCode


class Stream(NamedTuple):
    """This stream ends with this code, and the connection goes on."""

    code: ErrorCode
    number: int = 1


NOTHING = None  # the connection goes on, and a call on it is answered


def opened(number: int = 1, path: str = STREAM) -> bytes:
    return h2.frame(h2.HEADERS, h2.END_HEADERS, number, head(path))


def data(payload: bytes = b"", number: int = 1, flags: int = 0) -> bytes:
    return h2.frame(h2.DATA, flags, number, payload)


def block(*pairs: tuple[str, str]) -> bytes:
    return h2.frame(h2.HEADERS, BOTH, 1, h2.fields(pairs))


def call(*more: tuple[str, str], without: str = "", first: tuple[tuple[str, str], ...] = ()) -> bytes:
    """The headers of a call, with other fields behind or before them, and without one."""
    return block(*first, *(pair for pair in PAIRS if pair[0] != without), *more)


def ended(number: int = 1) -> bytes:
    """A whole call, which is refused at once."""
    return h2.frame(h2.HEADERS, BOTH, number, head("/nothing"))


def whole(number: int, size: int | None = None) -> bytes:
    """The headers of a call that says how large it is, and its data."""
    message = prefixed(request())
    length = ("content-length", f"{len(message) if size is None else size}")
    return h2.frame(h2.HEADERS, h2.END_HEADERS, number, h2.fields([*PAIRS, length])) + data(
        message, number, h2.END_STREAM
    )


RESET = h2.reset(1, ErrorCode.CANCEL)
PROTOCOL, CLOSED = ErrorCode.PROTOCOL, ErrorCode.STREAM_CLOSED
SIZE, FLOW = ErrorCode.FRAME_SIZE, ErrorCode.FLOW_CONTROL
SETTINGS_CUT = h2.frame(h2.SETTINGS, h2.ACK, 0, b"\0" * 6)

CASES: dict[str, tuple[bytes, Connection | Stream | None]] = {
    # 4: frames
    "4.1 an unknown frame": (h2.frame(0x16, 0xFF, 0, bytes(8)), NOTHING),
    "4.1 unknown flags": (h2.frame(h2.PING, 0x16, 0, bytes(8)), NOTHING),
    "4.1 a bit that is reserved": (struct.pack(">IBI", 8 << 8 | h2.PING, 0, 1 << 31) + bytes(8), NOTHING),
    "4.2 headers larger than a frame": (h2.frame(h2.HEADERS, 4, 1, bytes(16385)), Connection(SIZE)),
    "4.3 a priority within headers": (
        h2.frame(h2.HEADERS, 0, 1) + h2.frame(h2.PRIORITY, 0, 1, bytes(5)),
        Connection(PROTOCOL),
    ),
    "4.3 other headers within headers": (h2.frame(h2.HEADERS, 0, 1) + opened(3), Connection(PROTOCOL)),
    # 5.1: states of a stream
    "5.1 idle: data": (data(), Connection(PROTOCOL)),
    "5.1 idle: a reset": (RESET, Connection(PROTOCOL)),
    "5.1 idle: a window": (h2.window_update(1, 100), Connection(PROTOCOL)),
    "5.1 idle: a continuation": (h2.frame(h2.CONTINUATION, 4, 1), Connection(PROTOCOL)),
    "5.1 idle: a window of the server's": (h2.window_update(2, 100), Connection(PROTOCOL)),
    "5.1 half closed: data": (opened() + data(flags=1) + data(b"x"), Stream(CLOSED)),
    "5.1 half closed: headers": (opened() + data(flags=1) + opened(), Connection(CLOSED)),
    "5.1 half closed: a window and a priority": (
        opened() + data(flags=1) + h2.window_update(1, 9) + h2.frame(h2.PRIORITY, 0, 1, bytes(5)),
        NOTHING,
    ),
    "5.1 closed by a reset: data": (opened() + RESET + data(b"x"), Stream(CLOSED)),
    "5.1 closed by a reset: headers": (opened() + RESET + opened(), Connection(CLOSED)),
    "5.1 closed by a reset: what may be late": (
        opened() + RESET + h2.window_update(1, 9) + RESET + h2.frame(h2.PRIORITY, 0, 1, bytes(5)),
        NOTHING,
    ),
    "5.1 closed by both: data": (ended() + data(b"x"), Stream(CLOSED)),
    "5.1 closed by both: headers": (ended() + ended(), Connection(CLOSED)),
    "5.1.1 an even number": (opened(2), Connection(PROTOCOL)),
    "5.1.1 a number below others": (ended(5) + ended(3), Connection(PROTOCOL)),
    "5.5 an unknown frame within headers": (h2.frame(h2.HEADERS, 0, 1) + h2.frame(0x16), Connection(PROTOCOL)),
    # 6: each kind of frame
    "6.1 data of stream 0": (data(number=0), Connection(PROTOCOL)),
    "6.1 more padding than data": (opened() + data(b"\6abc", flags=h2.PADDED), Connection(PROTOCOL)),
    "6.2 headers of stream 0": (opened(0), Connection(PROTOCOL)),
    "6.2 more padding than headers": (h2.frame(h2.HEADERS, 4 | h2.PADDED, 1, b"\6abc"), Connection(PROTOCOL)),
    "6.3 a priority of stream 0": (h2.frame(h2.PRIORITY, 0, 0, bytes(5)), Connection(PROTOCOL)),
    "6.3 a short priority": (opened() + h2.frame(h2.PRIORITY, 0, 1, bytes(4)), Stream(SIZE)),
    "6.3 a short priority of no stream": (h2.frame(h2.PRIORITY, 0, 2, bytes(4)), Connection(SIZE)),
    "6.4 a reset of stream 0": (h2.reset(0, ErrorCode.CANCEL), Connection(PROTOCOL)),
    "6.4 a short reset": (opened() + h2.frame(h2.RST_STREAM, 0, 1, bytes(3)), Connection(SIZE)),
    "6.5 settings confirmed with more": (SETTINGS_CUT, Connection(SIZE)),
    "6.5 settings of a stream": (h2.frame(h2.SETTINGS, 0, 1), Connection(PROTOCOL)),
    "6.5 settings that are cut": (h2.frame(h2.SETTINGS, 0, 0, bytes(3)), Connection(SIZE)),
    "6.5.2 pushes that are neither": (h2.settings([(2, 2)]), Connection(PROTOCOL)),
    "6.5.2 a window too large": (h2.settings([(4, 1 << 31)]), Connection(FLOW)),
    "6.5.2 frames too small": (h2.settings([(5, 16383)]), Connection(PROTOCOL)),
    "6.5.2 frames too large": (h2.settings([(5, 1 << 24)]), Connection(PROTOCOL)),
    "6.5.2 unknown settings": (h2.settings([(0xFF, 1)]), NOTHING),
    "6.6 a push": (h2.frame(h2.PUSH_PROMISE, 4, 1, bytes(4)), Connection(PROTOCOL)),
    "6.7 a ping that is confirmed": (h2.frame(h2.PING, h2.ACK, 0, b"whatever"), NOTHING),
    "6.7 a ping of a stream": (h2.frame(h2.PING, 0, 1, bytes(8)), Connection(PROTOCOL)),
    "6.7 a short ping": (h2.frame(h2.PING, 0, 0, bytes(6)), Connection(SIZE)),
    "6.8 a goodbye of a stream": (h2.frame(h2.GOAWAY, 0, 1, bytes(8)), Connection(PROTOCOL)),
    "6.8 a short goodbye": (h2.frame(h2.GOAWAY, 0, 0, bytes(7)), Connection(SIZE)),
    "6.9 a window of nothing": (h2.window_update(0, 0), Connection(PROTOCOL)),
    "6.9 a stream's of nothing": (opened() + h2.window_update(1, 0), Stream(PROTOCOL)),
    "6.9 a short window": (h2.frame(h2.WINDOW_UPDATE, 0, 0, bytes(3)), Connection(SIZE)),
    "6.9.1 a window that overflows": (2 * h2.window_update(0, (1 << 31) - 1), Connection(FLOW)),
    "6.9.1 a stream's that overflows": (opened() + h2.window_update(1, (1 << 31) - 1), Stream(FLOW)),
    "6.9.2 a stream's that overflows by settings": (
        opened() + h2.window_update(1, 1000) + h2.settings([(4, (1 << 31) - 1)]),
        Connection(FLOW),
    ),
    "6.10 a continuation after the end": (opened() + h2.frame(h2.CONTINUATION, 4, 1), Connection(PROTOCOL)),
    "6.10 a continuation of stream 0": (h2.frame(h2.HEADERS, 0, 1) + h2.frame(9, 4, 0), Connection(PROTOCOL)),
    # 8: requests
    "8.1 trailers": (opened() + h2.frame(h2.HEADERS, BOTH, 1, h2.fields([("x", "y")])), NOTHING),
    "8.1 headers twice": (opened() + h2.frame(h2.HEADERS, 4, 1, h2.fields([("x", "y")])), Stream(PROTOCOL)),
    "8.1 pseudo-fields in trailers": (opened() + h2.frame(h2.HEADERS, BOTH, 1, head()), Stream(PROTOCOL)),
    "8.1.1 less than content-length": (whole(1, 99999), Stream(PROTOCOL)),
    "8.1.1 more than content-length": (whole(1, 1), Stream(PROTOCOL)),
    "8.1.1 content-length of no number": (call(("content-length", "-1")), Stream(PROTOCOL)),
    "8.1.1 as much as content-length": (whole(1), NOTHING),
    "8.2.1 a name in capitals": (call(("X-Test", "1")), Stream(PROTOCOL)),
    "8.2.1 a name with a space": (call(("x test", "1")), Stream(PROTOCOL)),
    "8.2.1 no name": (call(("", "1")), Stream(PROTOCOL)),
    "8.2.1 a value of two lines": (call(("x", "1\r\ny: 2")), Stream(PROTOCOL)),
    "8.2.1 a value that begins with a space": (call(("x", " 1")), Stream(PROTOCOL)),
    "8.2.2 connection": (call(("connection", "keep-alive")), Stream(PROTOCOL)),
    "8.2.2 transfer-encoding": (call(("transfer-encoding", "chunked")), Stream(PROTOCOL)),
    "8.2.2 te": (call(("te", "gzip"), without="te"), Stream(PROTOCOL)),
    "8.3 a pseudo-field that is unknown": (call(first=((":test", "1"),)), Stream(PROTOCOL)),
    "8.3 a pseudo-field of answers": (call(first=((":status", "200"),)), Stream(PROTOCOL)),
    "8.3 a pseudo-field behind others": (call((":authority", "x"), without=":authority"), Stream(PROTOCOL)),
    "8.3.1 no path": (call(without=":path"), Stream(PROTOCOL)),
    "8.3.1 an empty path": (call(first=((":path", ""),), without=":path"), Stream(PROTOCOL)),
    "8.3.1 no method": (call(without=":method"), Stream(PROTOCOL)),
    "8.3.1 no scheme": (call(without=":scheme"), Stream(PROTOCOL)),
    "8.3.1 two methods": (call(first=((":method", "POST"),)), Stream(PROTOCOL)),
    # RFC 7541
    "HPACK 2.3.3 an index of nothing": (h2.frame(h2.HEADERS, BOTH, 1, b"\xc6"), Connection(ErrorCode.COMPRESSION)),
    "HPACK 4.2 a size behind fields": (
        h2.frame(h2.HEADERS, BOTH, 1, head() + b"\x3f\xe1\x1f"),
        Connection(ErrorCode.COMPRESSION),
    ),
    "HPACK 5.2 eight bits of padding": (
        h2.frame(h2.HEADERS, BOTH, 1, b"\0\x85\xf2\xb2\x4a\x84\xff\x84\x49\x50\x9f\xff"),
        Connection(ErrorCode.COMPRESSION),
    ),
    "HPACK 5.2 padding of zeros": (
        h2.frame(h2.HEADERS, BOTH, 1, b"\0\x85\xf2\xb2\x4a\x84\xff\x83\x49\x50\x90"),
        Connection(ErrorCode.COMPRESSION),
    ),
    "HPACK 5.2 the end of a text": (
        h2.frame(h2.HEADERS, BOTH, 1, b"\0\x85\xf2\xb2\x4a\x84\xff\x87\x49\x51\xff\xff\xff\xfa\x7f"),
        Connection(ErrorCode.COMPRESSION),
    ),
    "HPACK 6.1 index 0": (h2.frame(h2.HEADERS, BOTH, 1, b"\x80"), Connection(ErrorCode.COMPRESSION)),
    "HPACK 6.3 a table too large": (h2.frame(h2.HEADERS, BOTH, 1, b"\x3f\xe2\x1f"), Connection(ErrorCode.COMPRESSION)),
    "HPACK 6.3 a smaller table": (h2.frame(h2.HEADERS, BOTH, 1, b"\x20" + head("/nothing")), NOTHING),
}


@pytest.fixture
def client(echo: Served) -> Iterator[RawClient]:
    with RawClient(echo.server.port) as client:
        yield client


@pytest.mark.parametrize("what", CASES)
def test_what_a_server_must_do(echo: Served, client: RawClient, what: str):
    sent, expected = CASES[what]
    client.send(sent)
    if isinstance(expected, Connection):
        assert client.ended() == expected.code
    else:
        if isinstance(expected, Stream):
            told = client.until(h2.RST_STREAM, expected.number)
            assert int.from_bytes(told.payload, "big") == expected.code
        client.call(101, INFER, request())
        assert client.trailers(101)["grpc-status"] == "0"
    client.socket.close()
    echo.until(lambda: not echo.server._setup.tasks and not echo.server._setup.opened)


def test_the_first_frame_has_settings(echo: Served):
    with RawClient(echo.server.port, greet=False) as client:
        client.send(h2.PREFACE + h2.frame(h2.PING, payload=bytes(8)))
        assert client.ended() == PROTOCOL


def test_what_comes_after_a_stream_that_we_ended_is_nothing(client: RawClient):
    client.send(opened(1, "/nothing"))  # refused before its message came
    assert client.until(h2.RST_STREAM, 1).payload == bytes(4)
    client.send(data(b"x") + data(b"y", flags=h2.END_STREAM))
    client.send(opened(3, "/nothing"))
    assert client.until(h2.RST_STREAM, 3).payload == bytes(4)
    client.send(h2.frame(h2.HEADERS, BOTH, 3, h2.fields([("x", "y")])))
    client.call(5, INFER, request())
    assert client.trailers(5)["grpc-status"] == "0"


# --- what no section forbids, and would cost too much -----------------------------------------------------------------


def test_many_windows_in_one_frame_cost_no_time(echo: Served, client: RawClient):
    echo.call(echo.model.gate.clear)
    for number in range(1, 2 * 200, 2):
        client.call(number, INFER, request())
    echo.until(lambda: echo.model.running == 200)
    frame = h2.settings([(h2.INITIAL_WINDOW_SIZE, size % 2 * 9) for size in range(2700)])
    began = time.process_time()
    client.send(frame * 20)
    assert client.is_open()
    assert time.process_time() - began < 2.0  # 20 * 2700 * 200 windows would be 11 million changes
    echo.call(echo.model.gate.set)


def test_headers_of_calls_count_as_what_is_held(echo: Served):
    """A field of 4,000 bytes that is in the table is one byte for the client, and 4,000 for us each time."""
    with RawClient(echo.server.port) as client:
        field = b"\x40\1x\x7f\xa1\x1e" + b"v" * 4000
        client.send(h2.frame(h2.HEADERS, h2.END_HEADERS, 1, head(STREAM) + field + b"\xbe" * 10))
        for number in range(3, 401, 2):
            client.send(h2.frame(h2.HEADERS, h2.END_HEADERS, number, head(STREAM) + b"\xbe" * 10))
        assert client.is_open()
        assert echo.call(lambda: echo.server._setup.held) > 200 * 40_000
    echo.until(lambda: echo.server._setup.held == 0)
