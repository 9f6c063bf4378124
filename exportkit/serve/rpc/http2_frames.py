"""Frames of HTTP/2 (RFC 9113) and fields of HPACK (RFC 7541), as a server writes them."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from enum import IntEnum
from functools import lru_cache

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM = ACK = 0x1
END_HEADERS, PADDED, HAS_PRIORITY = 0x4, 0x8, 0x20

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME = struct.Struct(">IBI")
"""The head of a frame: length and kind in one number, flags, and the number of the stream."""

MOST_FRAME = 16 << 10  # bytes of a frame, of either side: the protocol's own limit
MOST_WINDOW = (1 << 31) - 1
NUMBER = (1 << 31) - 1  # the bits of a stream's number

HEADER_TABLE_SIZE, ENABLE_PUSH, MAX_STREAMS, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE, MAX_HEADER_LIST = range(1, 7)


class ErrorCode(IntEnum):
    """Why a connection or a stream is ended."""

    NONE = 0
    PROTOCOL = 1
    INTERNAL = 2
    FLOW_CONTROL = 3
    STREAM_CLOSED = 5
    FRAME_SIZE = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION = 9
    TOO_MUCH = 11


class ConnectionProblemError(Exception):
    """The client breaks the protocol, so that the connection ends."""

    def __init__(self, problem: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.problem = problem


class StreamProblemError(Exception):
    """The client breaks the protocol, so that a stream ends."""

    def __init__(self, problem: ErrorCode, number: int) -> None:
        super().__init__(f"stream {number}: {problem.name}")
        self.problem = problem
        self.number = number


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    """Returns a frame."""
    return FRAME.pack(len(payload) << 8 | kind, flags, stream) + payload


def settings(values: Iterable[tuple[int, int]]) -> bytes:
    """Returns a frame SETTINGS."""
    return frame(SETTINGS, payload=b"".join(struct.pack(">HI", key, value) for key, value in values))


def window_update(stream: int, size: int) -> bytes:
    """Returns a frame that lets the client send `size` bytes more."""
    return FRAME.pack(4 << 8 | WINDOW_UPDATE, 0, stream) + size.to_bytes(4, "big")


def reset(stream: int, problem: ErrorCode) -> bytes:
    """Returns a frame that ends a stream."""
    return FRAME.pack(4 << 8 | RST_STREAM, 0, stream) + int(problem).to_bytes(4, "big")


def go_away(last_stream: int, problem: ErrorCode, message: str = "") -> bytes:
    """Returns a frame after which no stream begins. Those after the last one were not begun."""
    return frame(GOAWAY, payload=struct.pack(">II", last_stream, problem) + message.encode()[:200])


def fields(pairs: Iterable[tuple[str, str]]) -> bytes:
    """Returns header fields as HPACK has them: literally, so that they need no memory of those before."""
    return b"".join(_literal(name, value) for name, value in pairs)


@lru_cache(256)
def _literal(name: str, value: str) -> bytes:
    return b"\0" + _text(name) + _text(value)


def _text(text: str) -> bytes:
    data = text.encode("latin-1", "replace")
    if len(data) < 0x7F:
        return bytes([len(data)]) + data
    rest, length = len(data) - 0x7F, bytearray([0x7F])
    while rest >= 0x80:
        length.append(rest & 0x7F | 0x80)
        rest >>= 7
    length.append(rest)
    return bytes(length) + data
