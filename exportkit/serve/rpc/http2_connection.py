"""A connection of HTTP/2: it reads frames, keeps both sides to their windows, and bounds what a client can ask for."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import hpack

from exportkit.serve.rpc import http2_frames as h2
from exportkit.serve.rpc.http2_frames import FRAME, ConnectionProblemError, ErrorCode
from exportkit.serve.rpc.rpc_stream import STREAM_WINDOW, RpcStream

_CONNECTION_WINDOW = 64 << 20  # no limit of its own: the streams have theirs
_CREDIT = 4 << 20  # bytes of a connection after which its client hears that it may go on
_MOST_STREAMS = 256  # calls beyond these wait at the client
_HEADER_BYTES = 64 << 10
_MOST_CONTROL, _CONTROL_SECONDS = 10_000, 10.0  # frames that cost us something, and the client nothing
_BYTES_OF_A_FRAME = 256  # Who sends and takes so many bytes of messages may send one such frame more, to say so.
_COST_OF_A_RESET = 10  # of these frames: a call was begun for it
_MOST_PARTS = 32  # of frames that are written before any is sent
_MOST_SENT_TOGETHER = 64 << 10  # bytes for which one copy is cheaper than one more system call

PREFACE_SECONDS, IDLE_SECONDS, PONG_SECONDS, UNSENT_SECONDS = 15.0, 60.0, 20.0, 30.0
MESSAGE_SECONDS = 20.0  # A message that has begun, or that a call waits for, may pause for so long, as over HTTP.


@dataclass(eq=False)
class Connections:
    """The connections of a server, and what they have in common.

    Attributes:
        begin: Answers a call, whose headers have come.
        max_message: The most bytes of a message.
        max_held: The most bytes of messages that are not complete, or not wanted yet, of all connections.
        held: Their bytes now.
        opened: Those that are open.
        tasks: The calls that are being answered.
    """

    begin: Callable[[RpcStream], None]
    max_message: int
    max_held: int
    held: int = 0
    opened: set[Http2Connection] = field(default_factory=set)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)


class FrameReader(Protocol):
    """Reads frames with data that it knows."""

    def read(self, data: bytes, at: int, /) -> int:
        """Reads from a frame on, which is complete. Returns where the first one begins that it does not know."""


class Http2Connection(asyncio.Protocol):
    """A connection of a client that speaks HTTP/2 without asking (prior knowledge, or ALPN of TLS).

    Attributes:
        peer: The client's address, without its port. Empty: not known.
        window: The bytes of messages that the client takes now, of all streams.
        most_frame: The most bytes of a frame that it takes.
        paused: Whether what was written before is not sent yet.
        streams: The calls that are open, by number.
        shared: What all connections have in common.
        heard: When something came last.
        moved_bytes: Of messages in both directions.
        fast: Reads frames with data before this does.
    """

    def __init__(self, setup: Connections) -> None:
        """Counts from now on."""
        self._setup = setup
        self._loop = asyncio.get_running_loop()
        self._transport: Any = None
        self.peer = ""
        self.window = self._initial_window = (1 << 16) - 1
        self.most_frame = h2.MOST_FRAME
        self.paused = False
        self.streams: dict[int, RpcStream] = {}
        self.shared = setup
        self.moved_bytes = 0
        self.fast: FrameReader | None = None
        self.blocked: dict[RpcStream, None] = {}  # those that could send if the connection could
        self._left = b""
        self._greeted = False
        self._decoder = hpack.Decoder(max_header_list_size=_HEADER_BYTES)
        self._block: tuple[int, int, bytearray] | None = None  # headers that are not complete
        self._last = 0
        self._room = _CONNECTION_WINDOW
        self._out: list[bytes | memoryview] = []
        self._control, self._control_since = 0, self._loop.time()
        self.heard = self._since = self._loop.time()
        self._pinged: float | None = None
        self._leaving = False
        setup.opened.add(self)

    # --- the connection -----------------------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        """Says what the client may do."""
        self._transport = transport
        name = transport.get_extra_info("peername")
        self.peer = str(name[0]).partition("%")[0] if name else ""
        self.write(
            h2.settings(
                [
                    (h2.MAX_STREAMS, _MOST_STREAMS),
                    (h2.INITIAL_WINDOW_SIZE, STREAM_WINDOW),
                    (h2.MAX_HEADER_LIST, _HEADER_BYTES),
                ]
            )
            + h2.window_update(0, _CONNECTION_WINDOW - self.window)
        )

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancels what runs for the client."""
        self._setup.opened.discard(self)
        self._out.clear()
        self.blocked.clear()
        for stream in list(self.streams.values()):
            stream.lost()
        self.streams.clear()

    def pause_writing(self) -> None:
        """The client takes no more for now."""
        self.paused, self._since = True, self._loop.time()

    def resume_writing(self) -> None:
        """It does again."""
        self.paused = False
        self._send_blocked()

    def leave(self) -> None:
        """Begins no more calls, and closes after the last one."""
        if not self._leaving:
            self._leaving = True
            self.write(h2.go_away(self._last, ErrorCode.NONE))
        self._close_if_left()

    def end(self) -> None:
        """Closes, whatever is not sent yet."""
        if self._transport is not None:
            self.flush()
            self._transport.close()

    @property
    def made(self) -> bool:
        """Whether it is open: with TLS, after the handshake."""
        return self._transport is not None

    def look(self, now: float) -> None:
        """Ends the connection of a client that is gone, and asks one that has been silent."""
        if self._transport is None:
            return
        if not self._greeted:
            late = now - self.heard > PREFACE_SECONDS
        elif self._pinged is not None:
            late = now - self._pinged > PONG_SECONDS
        else:
            late = False
            if now - self.heard > IDLE_SECONDS:
                self._pinged = now
                self.write(h2.frame(h2.PING, payload=bytes(8)))
        stuck = [self._since] if self.paused else [s.stuck for s in self.streams.values() if s.stuck is not None]
        if late or (stuck and now - min(stuck) > UNSENT_SECONDS):
            self._transport.abort()
        for stream in [s for s in self.streams.values() if s.wants and now - s.moved > MESSAGE_SECONDS]:
            stream.give_up_waiting()

    def write(self, part: bytes | memoryview) -> None:
        """Sends what is written in this turn of the loop together."""
        if not self._out:
            self._loop.call_soon(self.flush)
        self._out.append(part)

    def flush(self) -> None:
        """Sends what was written."""
        parts, self._out = self._out, []
        if not parts or self._transport is None or self._transport.is_closing():
            return
        if sum(map(len, parts)) <= _MOST_SENT_TOGETHER:
            self._transport.write(b"".join(parts))
        else:
            self._transport.writelines(parts)

    def flush_if_much(self) -> None:
        """Sends what was written if it is a lot: `pause_writing` then tells when that is enough."""
        if len(self._out) > _MOST_PARTS:
            self.flush()

    def closed(self, stream: RpcStream) -> None:
        """A call is over."""
        self.streams.pop(stream.number, None)
        self.blocked.pop(stream, None)
        self._close_if_left()

    def _close_if_left(self) -> None:
        if self._leaving and not self.streams and self._transport is not None:
            self.flush()
            self._transport.close()

    def _fail(self, problem: ErrorCode, message: str) -> None:
        self.write(h2.go_away(self._last, problem, message))
        self.flush()
        self._transport.close()

    # --- what comes ---------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Reads the frames that are complete."""
        self.heard, self._pinged = self._loop.time(), None
        try:
            self._left = self._read(self._left + data if self._left else data)
        except ConnectionProblemError as error:
            self._left = b""
            self._fail(error.problem, str(error))

    def _read(self, data: bytes) -> bytes:
        """Returns what is left behind the last complete frame."""
        at, size = 0, len(data)
        if not self._greeted:
            at = len(h2.PREFACE)
            if data[:at] != h2.PREFACE[:size]:
                raise ConnectionProblemError(ErrorCode.PROTOCOL, "this port speaks HTTP/2")
            if size < at:
                return data
            self._greeted = True
        while size - at >= FRAME.size:
            packed, flags, number = FRAME.unpack_from(data, at)
            start = at + FRAME.size
            at = start + (packed >> 8)
            if at - start > h2.MOST_FRAME:
                raise ConnectionProblemError(ErrorCode.FRAME_SIZE, "a frame is larger than it may be")
            if at > size:
                return data[start - FRAME.size :]
            kind = packed & 0xFF
            if self._block is not None and kind != h2.CONTINUATION:
                raise ConnectionProblemError(ErrorCode.PROTOCOL, "headers are not complete")
            if kind == h2.DATA and self.fast is not None and not flags:
                begin = start - FRAME.size
                behind = self.fast.read(data, begin)
                if behind > begin:
                    at = behind
                    continue
            if kind == h2.DATA:
                self._data(flags, number & h2.NUMBER, data, start, at)
            elif (read := self._OTHERS.get(kind)) is not None:  # who sends an unknown one may
                read(self, flags, number & h2.NUMBER, data[start:at])
            if self._transport.is_closing():
                return b""
        return data[at:] if at < size else b""

    def read_elsewhere(self, size: int) -> None:
        """So many bytes of frames with data were read by `fast`."""
        self.moved_bytes += size
        self._room -= size
        if self._room < _CONNECTION_WINDOW - _CREDIT:
            self.write(h2.window_update(0, _CONNECTION_WINDOW - self._room))
            self._room = _CONNECTION_WINDOW

    def _data(self, flags: int, number: int, data: bytes, start: int, end: int) -> None:
        size = end - start
        self.moved_bytes += size
        self._room -= size
        if self._room < 0:
            raise ConnectionProblemError(ErrorCode.FLOW_CONTROL, "more data came than was allowed")
        if self._room < _CONNECTION_WINDOW - _CREDIT:
            self.write(h2.window_update(0, _CONNECTION_WINDOW - self._room))
            self._room = _CONNECTION_WINDOW
        if flags & h2.PADDED:
            start, end = _without_padding(data, start, end)
        if start == end and not flags & h2.END_STREAM:
            self._count()
        stream = self.streams.get(number)
        if stream is not None:
            stream.received(data, start, end, size)
            if flags & h2.END_STREAM:
                stream.half_closed()
        elif number > self._last or not number:
            raise ConnectionProblemError(ErrorCode.PROTOCOL, "data came for no stream")

    def _headers(self, flags: int, number: int, payload: bytes) -> None:
        start, end = _without_padding(payload, 0, len(payload)) if flags & h2.PADDED else (0, len(payload))
        if flags & h2.HAS_PRIORITY:
            start += 5
            if start > end:
                raise ConnectionProblemError(ErrorCode.FRAME_SIZE, "a frame of headers is too short")
        self._block = (number, flags, bytearray(payload[start:end]))
        self._end_headers(flags)

    def _continuation(self, flags: int, number: int, payload: bytes) -> None:
        if self._block is None or self._block[0] != number:
            raise ConnectionProblemError(ErrorCode.PROTOCOL, "a continuation came of no headers")
        self._count()
        self._block[2].extend(payload)
        if len(self._block[2]) > _HEADER_BYTES:
            raise ConnectionProblemError(ErrorCode.TOO_MUCH, f"headers have more than {_HEADER_BYTES} bytes")
        self._end_headers(flags)

    def _end_headers(self, flags: int) -> None:
        if not flags & h2.END_HEADERS or self._block is None:
            return
        (number, first, block), self._block = self._block, None
        try:
            headers = self._decoder.decode(bytes(block), raw=True)
        except hpack.OversizedHeaderListError:
            raise ConnectionProblemError(ErrorCode.TOO_MUCH, f"headers have more than {_HEADER_BYTES} bytes") from None
        except hpack.HPACKError as error:
            raise ConnectionProblemError(ErrorCode.COMPRESSION, f"headers cannot be read: {error}") from None
        stream = self.streams.get(number)
        if stream is not None:  # trailers of the client
            if not first & h2.END_STREAM:
                raise ConnectionProblemError(ErrorCode.PROTOCOL, "headers came twice")
            stream.half_closed()
        elif number > self._last and number & 1:
            self._last = number
            self._open(number, headers, ended=bool(first & h2.END_STREAM))
        elif not number & 1:
            raise ConnectionProblemError(ErrorCode.PROTOCOL, "a client's streams have odd numbers")

    def _open(self, number: int, headers: Any, *, ended: bool) -> None:
        if self._leaving or len(self.streams) >= _MOST_STREAMS:
            self._count(_COST_OF_A_RESET)
            self.write(h2.reset(number, ErrorCode.REFUSED_STREAM))
            return
        stream = RpcStream(self, number, self._initial_window)
        self.streams[number] = stream
        if stream.begin(headers):
            self._setup.begin(stream)
        if ended:
            stream.half_closed()

    def _reset(self, flags: int, number: int, payload: bytes) -> None:
        _check_size(payload, 4)
        if (stream := self.streams.get(number)) is not None:
            stream.lost()
            self.closed(stream)
            self._count(_COST_OF_A_RESET)
        else:
            self._count()

    def _settings(self, flags: int, number: int, payload: bytes) -> None:
        self._count()
        if flags & h2.ACK:
            return
        if len(payload) % 6 or number:
            raise ConnectionProblemError(ErrorCode.FRAME_SIZE, "settings have another length")
        for key, value in struct.iter_unpack(">HI", payload):
            if key == h2.INITIAL_WINDOW_SIZE:
                if value > h2.MOST_WINDOW:
                    raise ConnectionProblemError(ErrorCode.FLOW_CONTROL, "a window is larger than it may be")
                more, self._initial_window = value - self._initial_window, value
                for stream in list(self.streams.values()):
                    stream.window_grew(more)
            elif key == h2.MAX_FRAME_SIZE:
                self.most_frame = max(h2.MOST_FRAME, min(value, 1 << 20))
        self.write(h2.frame(h2.SETTINGS, h2.ACK))

    def _ping(self, flags: int, number: int, payload: bytes) -> None:
        _check_size(payload, 8)
        self._count()
        if not flags & h2.ACK:
            self.write(h2.frame(h2.PING, h2.ACK, payload=payload))

    def _window_update(self, flags: int, number: int, payload: bytes) -> None:
        _check_size(payload, 4)
        more = int.from_bytes(payload, "big") & h2.NUMBER
        self._count()
        if number == 0:
            self.window += more
            if not more or self.window > h2.MOST_WINDOW:
                raise ConnectionProblemError(ErrorCode.FLOW_CONTROL, "a window is larger than it may be")
            self._send_blocked()
        elif (stream := self.streams.get(number)) is not None:
            stream.window_grew(more)
            if not more or stream.window > h2.MOST_WINDOW:
                raise ConnectionProblemError(ErrorCode.FLOW_CONTROL, "a window is larger than it may be")

    def _refused(self, flags: int, number: int, payload: bytes) -> None:
        raise ConnectionProblemError(ErrorCode.PROTOCOL, "a client pushes nothing")

    def _ignored(self, flags: int, number: int, payload: bytes) -> None:
        self._count()

    def _send_blocked(self) -> None:
        for stream in list(self.blocked):
            if self.paused or self.window <= 0:
                return
            del self.blocked[stream]
            stream.send_waiting()

    def _count(self, cost: int = 1) -> None:
        """Counts a frame that a client can send by the million without waiting for us."""
        self._control += cost
        if self._control > _MOST_CONTROL + self.moved_bytes // _BYTES_OF_A_FRAME:
            now = self._loop.time()
            if now - self._control_since < _CONTROL_SECONDS:
                raise ConnectionProblemError(ErrorCode.TOO_MUCH, "too many frames without data came")
            self._control, self._control_since, self.moved_bytes = 0, now, 0

    _OTHERS: ClassVar[Mapping[int, Callable[[Http2Connection, int, int, bytes], None]]] = {
        h2.HEADERS: _headers,
        h2.PRIORITY: _ignored,
        h2.RST_STREAM: _reset,
        h2.SETTINGS: _settings,
        h2.PUSH_PROMISE: _refused,
        h2.PING: _ping,
        h2.GOAWAY: _ignored,
        h2.WINDOW_UPDATE: _window_update,
        h2.CONTINUATION: _continuation,
    }


def _without_padding(data: bytes, start: int, end: int) -> tuple[int, int]:
    if start == end or start + 1 + data[start] > end:
        raise ConnectionProblemError(ErrorCode.PROTOCOL, "a frame has more padding than bytes")
    return start + 1, end - data[start]


def _check_size(payload: bytes, size: int) -> None:
    if len(payload) != size:
        raise ConnectionProblemError(ErrorCode.FRAME_SIZE, f"a frame has {len(payload)} bytes instead of {size}")
