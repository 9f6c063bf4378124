"""A connection of HTTP/2: it reads frames, keeps both sides to their windows, and bounds what a client can ask for."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from exportkit.serve.rpc import http2_frames as h2
from exportkit.serve.rpc.http2_frames import FRAME, ConnectionProblemError, ErrorCode, StreamProblemError
from exportkit.serve.rpc.http2_headers import HEADER_BYTES, HeaderBlocks, Headers, without_padding
from exportkit.serve.rpc.http2_rules import Fields, check_frame, check_setting, why_malformed
from exportkit.serve.rpc.rpc_stream import STREAM_WINDOW, RpcStream

_CONNECTION_WINDOW = 64 << 20  # no limit of its own: the streams have theirs
_CREDIT = 4 << 20  # bytes of a connection after which its client hears that it may go on
_MOST_STREAMS = 256  # calls beyond these wait at the client
_MOST_CONTROL, _CONTROL_SECONDS = 10_000, 10.0  # frames that cost us something, and the client nothing
_BYTES_OF_A_FRAME = 256  # Who sends and takes so many bytes of messages may send one such frame more, to say so.
_COST_OF_A_RESET = 10  # of these frames: a call was begun for it
_MOST_CLOSED = 2 * _MOST_STREAMS  # streams of which we know how they were closed
_WINDOWS_OF_A_FRAME = 16  # that change by one, at the cost of a frame
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
        self.blocked: dict[RpcStream, None] = {}  # those that could send if the connection could
        self._left = b""
        self._greeted = self._had_settings = False
        self._closed: dict[int, bool] = {}  # streams that were closed last, and whether their client may not know it
        self._headers = HeaderBlocks()
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
                    (h2.MAX_HEADER_LIST, HEADER_BYTES),
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

    def closed(self, stream: RpcStream, *, by_us: bool) -> None:
        """A call is over. `by_us`: what the client still sends of it is no error."""
        self.streams.pop(stream.number, None)
        self.blocked.pop(stream, None)
        self._was_closed(stream.number, by_us=by_us)
        self._close_if_left()

    def _was_closed(self, number: int, *, by_us: bool) -> None:
        self._closed[number] = by_us
        if len(self._closed) > _MOST_CLOSED:
            del self._closed[next(iter(self._closed))]

    def _end_stream(self, error: StreamProblemError) -> None:
        """Ends a stream whose client broke the protocol; if there is none, the connection."""
        if self._is_idle(error.number):
            raise ConnectionProblemError(error.problem, str(error))
        self._count(_COST_OF_A_RESET)
        self.write(h2.reset(error.number, error.problem))
        if (stream := self.streams.get(error.number)) is not None:
            stream.lost()
            self.closed(stream, by_us=True)
        else:
            self._was_closed(error.number, by_us=True)

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
        """Reads the complete frames. Returns the bytes after them."""
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
            if not self._had_settings:
                if kind != h2.SETTINGS:
                    raise ConnectionProblemError(ErrorCode.PROTOCOL, "a client begins with its settings")
                self._had_settings = True
            if self._headers.incomplete and kind != h2.CONTINUATION:
                raise ConnectionProblemError(ErrorCode.PROTOCOL, "headers are not complete")
            try:
                self._read_frame(kind, flags, number & h2.NUMBER, data, start, at)
            except StreamProblemError as error:
                self._end_stream(error)
            if self._transport.is_closing():
                return b""
        return data[at:] if at < size else b""

    def _read_frame(self, kind: int, flags: int, number: int, data: bytes, start: int, end: int) -> None:
        if kind == h2.DATA:
            self._data(flags, number, data, start, end)
        elif (read := self._OTHERS.get(kind)) is not None:  # who sends an unknown one may
            check_frame(kind, flags, number, end - start)
            read(self, flags, number, data[start:end])

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
            start, end = without_padding(data, start, end)
        if start == end and not flags & h2.END_STREAM:
            self._count()
        stream = self.streams.get(number)
        if stream is not None and not stream.ended:
            stream.received(data, start, end, size)
            if flags & h2.END_STREAM:
                stream.half_closed()
        elif self._is_idle(number) or not number:
            raise ConnectionProblemError(ErrorCode.PROTOCOL, "data came for no stream")
        elif not self._closed.get(number):
            raise StreamProblemError(ErrorCode.STREAM_CLOSED, number)

    def _is_idle(self, number: int) -> bool:
        return number > self._last or not number & 1

    def _header(self, flags: int, number: int, payload: bytes) -> None:
        self._have(self._headers.begin(flags, number, payload))

    def _continuation(self, flags: int, number: int, payload: bytes) -> None:
        self._count()
        self._have(self._headers.go_on(flags, number, payload))

    def _have(self, headers: Headers | None) -> None:
        if headers is None:
            return
        number, ended, fields = headers
        why = why_malformed(fields, trailers=number in self.streams)
        if not number & 1:
            raise ConnectionProblemError(ErrorCode.PROTOCOL, "a client's streams have odd numbers")
        if number > self._last:
            self._last = number
            if why is not None:
                raise StreamProblemError(ErrorCode.PROTOCOL, number)
            self._open(number, fields, ended=ended)
        elif (stream := self.streams.get(number)) is not None and not stream.ended:
            if why is not None or not ended:
                raise StreamProblemError(ErrorCode.PROTOCOL, number)
            stream.half_closed()
        elif not self._closed.get(number):
            known = number in self.streams or number in self._closed
            problem = ErrorCode.STREAM_CLOSED if known else ErrorCode.PROTOCOL
            raise ConnectionProblemError(problem, "headers came of a stream that is closed")

    def _open(self, number: int, fields: Fields, *, ended: bool) -> None:
        if self._leaving or len(self.streams) >= _MOST_STREAMS:
            self._count(_COST_OF_A_RESET)
            self.write(h2.reset(number, ErrorCode.REFUSED_STREAM))
            self._was_closed(number, by_us=True)
            return
        stream = RpcStream(self, number, self._initial_window)
        self.streams[number] = stream
        if stream.begin(fields):
            self._setup.begin(stream)
        if ended:
            stream.half_closed()

    def _reset(self, flags: int, number: int, payload: bytes) -> None:
        if (stream := self._known(number)) is not None:
            stream.lost()
            self.closed(stream, by_us=False)
            self._count(_COST_OF_A_RESET)
        else:
            self._count()

    def _known(self, number: int) -> RpcStream | None:
        """Returns a stream that is open; None: it is closed."""
        if self._is_idle(number):
            raise ConnectionProblemError(ErrorCode.PROTOCOL, "a frame came for no stream")
        return self.streams.get(number)

    def _settings(self, flags: int, number: int, payload: bytes) -> None:
        self._count()
        if flags & h2.ACK:
            return
        window = self._initial_window
        for key, value in struct.iter_unpack(">HI", payload):
            check_setting(key, value)
            if key == h2.INITIAL_WINDOW_SIZE:
                window = value
            elif key == h2.MAX_FRAME_SIZE:
                self.most_frame = min(value, 1 << 20)
        if more := window - self._initial_window:
            self._initial_window = window
            self._count(len(self.streams) // _WINDOWS_OF_A_FRAME)
            for stream in list(self.streams.values()):
                if stream.window + more > h2.MOST_WINDOW:
                    raise ConnectionProblemError(ErrorCode.FLOW_CONTROL, "a window is larger than it may be")
                stream.window_grew(more)
        self.write(h2.frame(h2.SETTINGS, h2.ACK))

    def _ping(self, flags: int, number: int, payload: bytes) -> None:
        self._count()
        if not flags & h2.ACK:
            self.write(h2.frame(h2.PING, h2.ACK, payload=payload))

    def _window_update(self, flags: int, number: int, payload: bytes) -> None:
        more = int.from_bytes(payload, "big") & h2.NUMBER
        self._count()
        stream = self._known(number) if number else None
        window = self.window if stream is None else stream.window
        problem = ErrorCode.FLOW_CONTROL if more else ErrorCode.PROTOCOL
        wrong = not more or window + more > h2.MOST_WINDOW
        if number == 0:
            if wrong:
                raise ConnectionProblemError(problem, "a window is larger than it may be, or grows by nothing")
            self.window += more
            self._send_blocked()
        elif stream is not None:
            if wrong:
                raise StreamProblemError(problem, number)
            stream.window_grew(more)

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
        h2.HEADERS: _header,
        h2.PRIORITY: _ignored,
        h2.RST_STREAM: _reset,
        h2.SETTINGS: _settings,
        h2.PUSH_PROMISE: _refused,
        h2.PING: _ping,
        h2.GOAWAY: _ignored,
        h2.WINDOW_UPDATE: _window_update,
        h2.CONTINUATION: _continuation,
    }
