"""A client that sends frames of HTTP/2 as a test writes them."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import hpack

from exportkit.serve.rpc import http2_frames as h2

INFER = "/inference.GRPCInferenceService/ModelInfer"
READY = "/inference.GRPCInferenceService/ServerReady"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"


class Frame(NamedTuple):
    """A frame that came."""

    kind: int
    flags: int
    stream: int
    payload: bytes


def head(path: str = INFER, *more: tuple[str, str], method: str = "POST", kind: str = "application/grpc") -> bytes:
    """The header block of a call, without memory of those before."""
    pairs = [(":method", method), (":scheme", "http"), (":path", path), (":authority", "localhost")]
    return h2.fields([*pairs, ("content-type", kind), ("te", "trailers"), *more])


def prefixed(message: bytes, compressed: int = 0) -> bytes:
    return bytes([compressed]) + len(message).to_bytes(4, "big") + message


class RawClient:
    """A connection, greeted."""

    def __init__(self, port: int, settings: Sequence[tuple[int, int]] = (), *, greet: bool = True) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=20)
        self._left = b""
        self._decoder = hpack.Decoder()
        if greet:
            self.send(h2.PREFACE + h2.settings(settings))

    def send(self, data: bytes) -> None:
        with contextlib.suppress(ConnectionError):  # the server may have closed: the test reads why
            self.socket.sendall(data)

    def call(self, number: int, path: str = INFER, message: bytes | None = None, *more: tuple[str, str]) -> None:
        """Sends a whole call; None: its headers alone."""
        data = h2.frame(h2.HEADERS, h2.END_HEADERS, number, head(path, *more))
        if message is not None:
            whole = prefixed(message)
            parts = [whole[at : at + h2.MOST_FRAME] for at in range(0, len(whole), h2.MOST_FRAME)]
            data += b"".join(h2.frame(h2.DATA, 0, number, part) for part in parts)
            data += h2.frame(h2.DATA, h2.END_STREAM, number)
        self.send(data)

    def opened(self, number: int) -> bytes:
        """The headers of a call."""
        return h2.frame(h2.HEADERS, h2.END_HEADERS, number, head())

    def frames(self) -> Iterator[Frame]:
        """Yields what comes, until the server closes."""
        while True:
            while len(self._left) >= 9:
                packed, flags, stream = h2.FRAME.unpack_from(self._left)
                end = 9 + (packed >> 8)
                if len(self._left) < end:
                    break
                frame = Frame(packed & 0xFF, flags, stream, self._left[9:end])
                self._left = self._left[end:]
                yield frame
            try:
                data = self.socket.recv(1 << 16)
            except ConnectionError:
                return
            if not data:
                return
            self._left += data

    def until(self, kind: int, stream: int | None = None, *, ack: bool = False) -> Frame:
        """Returns the next frame of a kind."""
        for frame in self.frames():
            if frame.kind == kind and stream in (None, frame.stream) and (not ack or frame.flags & h2.ACK):
                return frame
        raise AssertionError("the server closed before")

    def ended(self) -> int | None:
        """Reads until the server closes. Returns why it says that it does."""
        why = None
        for frame in self.frames():
            if frame.kind == h2.GOAWAY:
                why = int.from_bytes(frame.payload[4:8], "big")
        return why

    def trailers(self, stream: int) -> dict[str, str]:
        """Returns the fields of the headers that end a stream."""
        for frame in self.frames():
            if frame.kind == h2.HEADERS:
                found = {str(name): str(value) for name, value in self._decoder.decode(frame.payload)}
                if frame.stream == stream and frame.flags & h2.END_STREAM:
                    return found
        raise AssertionError("the server closed before")

    def is_open(self) -> bool:
        """Whether the server answers a ping."""
        self.send(h2.frame(h2.PING, payload=b"12345678"))
        with contextlib.suppress(AssertionError):
            return self.until(h2.PING, ack=True).payload == b"12345678"
        return False

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()
