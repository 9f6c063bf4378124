"""A call of gRPC on a stream of HTTP/2: its messages in both directions, its deadline, and its status."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from exportkit.serve.rpc import http2_frames as h2
from exportkit.serve.rpc.http2_frames import FRAME, ErrorCode, StreamProblemError
from exportkit.serve.rpc.http2_rules import Fields
from exportkit.serve.rpc.rpc_coding import (
    CODES,
    MessageTooLargeError,
    TooMuchHeldError,
    UnreadableError,
    encoded_details,
    inflated,
    plain_field,
)
from exportkit.serve.rpc.stream_carrier import StreamCarrier
from exportkit.serve.statuses import BadRequestError, NotOfferedError, ServeError

_PREFIX = 5  # bytes before each message: whether it is compressed, and its length
STREAM_WINDOW = 4 << 20  # bytes that a client may send before it hears that it may go on
_BEFOREHAND = STREAM_WINDOW // 2  # bytes of complete messages that wait at the most, before it does
_COPIED = 64 << 10  # bytes of an answer for which a copy is cheaper than one more frame
_TIMEOUT = re.compile(rb"(\d{1,8})([HMSmun])")
_SECONDS = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_BEGINNING = h2.fields([(":status", "200"), ("content-type", "application/grpc")])
_ENCODINGS = "identity, deflate, gzip"
_NOT_METADATA = (b":", b"grpc-timeout", b"grpc-encoding", b"grpc-accept-encoding", b"te", b"content-type")

Metadata = tuple[tuple[str, str | bytes], ...]
Message = bytes | bytearray


class RpcStream:
    """A call. All methods are for the event loop's thread.

    Attributes:
        number: The stream's.
        window: The bytes of messages that the client takes now, of this stream.
        method: The full name of the method.
        metadata: What the client sent beside its messages.
        peer: The client's address, without its port.
        unsent: The bytes that wait for the client.
        stuck: Since when none of them moved; None: none waits.
        moved: When a part of a message came last, or the call.
        drained: Is called when nothing waits for the client any more.
    """

    def __init__(self, connection: StreamCarrier[RpcStream], number: int, window: int) -> None:
        """`begin` reads its headers."""
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self.number = number
        self.window = window
        self.method = ""
        self.metadata: Metadata = ()
        self.peer = connection.peer
        self.unsent = 0
        self.stuck: float | None = None
        self.moved = connection.heard
        self.drained: Callable[[], None] | None = None
        self._take: Callable[[Message | None], None] | None = None
        self._deadline: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._encoding = "identity"
        self._task: asyncio.Task[None] | None = None
        self._began = self._over = self._ended = False  # our headers were sent; our trailers were; its messages were
        self._missing: int | None = None  # bytes that must come still, where the client said how many there are
        self._head = b""  # the beginning of a message
        self._message: bytearray | None = None  # one that is not complete, and how much of it is there
        self._filled = self._compressed = 0
        self._ready: deque[Message] = deque()
        self._held = self._owed = 0  # bytes in _ready or with `take`, and bytes that the client may send again
        self._counted = 0  # bytes that count as held by all connections
        self._reader: asyncio.Future[None] | None = None
        self._waiting: deque[memoryview] = deque()
        self._trailers: bytes | None = None
        self._writer: asyncio.Future[None] | None = None

    # --- the call -----------------------------------------------------------------------------------------------------

    def begin(self, fields: Fields) -> bool:
        """Reads the headers. Returns whether the call can be answered; if not, it was."""
        given = dict(fields)
        if (length := given.get(b"content-length")) is not None:
            self._missing = int(length)
        kind = given.get(b"content-type", b"")
        if given.get(b":method") != b"POST" or not kind.startswith(b"application/grpc"):
            status = "415" if given.get(b":method") == b"POST" else "405"
            self._end_with(h2.fields([(":status", status)]))
            return False
        self.method = given.get(b":path", b"").decode("latin-1")
        try:
            self._count(sum(len(name) + len(value) for name, value in fields))
            self.metadata = tuple(plain_field(*pair) for pair in fields if not pair[0].startswith(_NOT_METADATA))
            self._encoding = given.get(b"grpc-encoding", b"identity").decode("latin-1")
            if self._encoding not in _ENCODINGS.split(", "):
                raise NotOfferedError(f"messages are compressed by {self._encoding[:20]}; taken are {_ENCODINGS}")
            if (timeout := given.get(b"grpc-timeout")) is not None:
                self._set_deadline(timeout)
        except ServeError as error:
            self.finish(error.code, error.text, (("grpc-accept-encoding", _ENCODINGS),))
        except TooMuchHeldError as error:
            self.finish("RESOURCE_EXHAUSTED", str(error))
        return self._trailers is None

    def run(self, work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
        """Answers the call. If the client leaves, or its deadline passes, this is cancelled."""
        self._task = task = self._loop.create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def _set_deadline(self, given: bytes) -> None:
        found = _TIMEOUT.fullmatch(given)
        if found is None:
            raise BadRequestError("grpc-timeout is not a number of up to eight digits and a unit")
        seconds = int(found[1]) * _SECONDS[found[2]]
        self._deadline = self._loop.time() + seconds
        self._timer = self._loop.call_later(seconds, self._expire)

    def _expire(self) -> None:
        self.finish("DEADLINE_EXCEEDED", "Deadline Exceeded")
        self._cancel()

    def lost(self) -> None:
        """The client left the call, or the connection."""
        self._over = True
        self._stop()
        self._cancel()

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the deadline. None: there is none."""
        return None if self._deadline is None else max(0.0, self._deadline - self._loop.time())

    # --- messages of the client ---------------------------------------------------------------------------------------

    def received(self, data: bytes, start: int, end: int, size: int) -> None:
        """Takes a part of the client's messages. `size` counts for the stream's window."""
        self._owed += size
        self.moved = self._connection.heard
        if self._missing is not None:
            self._missing -= end - start
            if self._missing < 0:
                raise StreamProblemError(ErrorCode.PROTOCOL, self.number)
        if self._over or self._ended:
            return
        if self._owed > STREAM_WINDOW:
            self._fail("RESOURCE_EXHAUSTED", "more data came than was allowed")
            return
        try:
            self._assemble(data, start, end)
        except (MessageTooLargeError, TooMuchHeldError) as error:
            self._fail("RESOURCE_EXHAUSTED", str(error))
        except UnreadableError as error:
            self._fail("INTERNAL", str(error))
        if self._owed > _BEFOREHAND:
            self._allow_more()

    @property
    def incomplete(self) -> bool:
        """Whether a message has begun, and more of it must come."""
        return self._message is not None or bool(self._head)

    def _assemble(self, data: bytes, start: int, end: int) -> None:
        if self._message is not None:
            start = self._fill(data, start, end)
        if self._head and start < end:
            data, start, end = self._head + data[start:end], 0, len(self._head) + end - start
            self._head = b""
        while end - start >= _PREFIX:
            size = int.from_bytes(data[start + 1 : start + _PREFIX], "big")
            if size > (most := self._connection.shared.max_message):
                raise MessageTooLargeError(f"a message of {size} bytes is larger than {most}, the most of any model")
            compressed, start = data[start], start + _PREFIX
            if compressed > 1 or (compressed and self._encoding == "identity"):
                raise UnreadableError("a message says that it is compressed, and the call does not say how")
            if size > end - start:
                self._message, self._filled, self._compressed = bytearray(size), 0, compressed
                self._fill(data, start, end)
                return
            self._complete(data[start : start + size], compressed)
            start += size
        self._head = data[start:end]

    def _fill(self, data: bytes, start: int, end: int) -> int:
        message = self._message
        assert message is not None
        taken = min(end - start, len(message) - self._filled)
        message[self._filled : self._filled + taken] = memoryview(data)[start : start + taken]
        self._filled += taken
        self._count(taken)
        if self._filled == len(message):
            self._message = None
            self._count(-len(message))
            self._complete(message, self._compressed)
        return start + taken

    def _complete(self, message: Message, compressed: int) -> None:
        if compressed:
            message = inflated(message, self._encoding, self._connection.shared.max_message)
        if self._take is not None:
            self._take(message)
            return
        self._ready.append(message)
        self.hold(len(message))
        self._wake_reader()

    def half_closed(self) -> None:
        """The client sends no more messages."""
        if self._ended:
            return
        if self._missing:
            raise StreamProblemError(ErrorCode.PROTOCOL, self.number)
        self._ended = True
        if self._over:
            return
        if self._message is not None or self._head:
            self._fail("INTERNAL", "the last message is not complete")
        elif self._take is not None:
            self._take(None)
        self._wake_reader()

    async def message(self) -> Message | None:
        """Returns the client's next message, and does not keep it. None: there was the last one before."""
        while not self._ready:
            if self._ended:
                return None
            self._reader = self._loop.create_future()
            await self._reader
        message = self._ready.popleft()
        self.hold(-len(message))
        return message

    def consume(self, take: Callable[[Message | None], None]) -> None:
        """Calls `take` with each message as soon as it is there, and with None after the last."""
        self._take = take
        while self._ready:
            message = self._ready.popleft()
            self.hold(-len(message))
            take(message)
        if self._ended and not self._over:
            take(None)

    def hold(self, size: int) -> None:
        """Counts bytes that `take` keeps (or, below 0, keeps no more): the client sends no more than it may."""
        self._held += size
        self._count(size)
        if size < 0:
            self._allow_more()

    def _count(self, size: int) -> None:
        """Counts what all connections hold together, until the call is over."""
        if self._over:
            return
        shared = self._connection.shared
        self._counted += size
        shared.held += size
        if size > 0 and shared.held > shared.max_held:
            raise TooMuchHeldError(f"{shared.held} bytes of messages wait, and at most {shared.max_held} may")

    @property
    def ended(self) -> bool:
        """Whether the client sends no more messages."""
        return self._ended

    @property
    def wants(self) -> bool:
        """Whether something waits for the client's message, or for more of it."""
        return self.incomplete or (self._reader is not None and not self._reader.done())

    def give_up_waiting(self) -> None:
        """Ends the call: its message does not come."""
        self._fail("DEADLINE_EXCEEDED", "the message does not come, or comes too slowly")

    def _allow_more(self) -> None:
        if self._owed > _BEFOREHAND and self._held <= _BEFOREHAND and not self._ended and not self._over:
            self._connection.write(h2.window_update(self.number, self._owed))
            self._owed = 0

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    # --- answers ------------------------------------------------------------------------------------------------------

    def send(self, message: bytes) -> None:
        """Sends an answer, as soon as the client takes it."""
        if self._over:
            return
        connection, size = self._connection, len(message) + _PREFIX
        self._send_beginning()
        if self._waiting or connection.paused or size > min(self.window, connection.window, connection.most_frame):
            head = b"\0" + len(message).to_bytes(4, "big")
            parts = (head + message,) if size <= _COPIED else (head, message)
            self._waiting += map(memoryview, parts)
            self.unsent += size
            self.stuck = self._loop.time()
            self.send_waiting()
            return
        self.window -= size
        connection.window -= size
        connection.moved_bytes += size
        # DATA is number 0: the length alone.
        connection.write(FRAME.pack(size << 8, 0, self.number) + b"\0" + len(message).to_bytes(4, "big") + message)

    async def sent(self) -> None:
        """Waits until the client has taken so much that more may be written."""
        while self.unsent and not self._over:
            self._writer = self._loop.create_future()
            await self._writer

    def finish(self, code: str, details: str = "", trailers: Sequence[tuple[str, str]] = ()) -> None:
        """Ends the call after what was sent before, unless it is over."""
        if self._over or self._trailers is not None:
            return
        status = [("grpc-status", f"{CODES[code]}")]
        if details:
            status.append(("grpc-message", encoded_details(details)))
        self._trailers = h2.fields([*status, *trailers])
        if not self._waiting:
            self._end_with(self._trailers if self._began else _BEGINNING + self._trailers)

    def window_grew(self, more: int) -> None:
        """The client takes more bytes of this stream."""
        self.window += more
        self.send_waiting()

    def send_waiting(self) -> None:
        """Sends what the windows allow."""
        connection = self._connection
        while self._waiting and not self._over:
            part = self._waiting[0]
            size = min(len(part), self.window, connection.window, connection.most_frame)
            if connection.paused or (size <= 0 and len(part)):
                if self.window > 0:
                    connection.blocked[self] = None
                break
            connection.write(FRAME.pack(size << 8, 0, self.number))
            connection.write(part[:size])
            self.window -= size
            connection.window -= size
            connection.moved_bytes += size
            self.unsent -= size
            self.stuck = self._loop.time() if self.unsent else None
            if size == len(part):
                self._waiting.popleft()
            else:
                self._waiting[0] = part[size:]
            connection.flush_if_much()
        if not self._waiting:
            if self._writer is not None and not self._writer.done():
                self._writer.set_result(None)
            if self.drained is not None:
                self.drained()
            if self._trailers is not None:
                self._end_with(self._trailers)

    def _send_beginning(self) -> None:
        if not self._began:
            self._began = True
            self._connection.write(h2.frame(h2.HEADERS, h2.END_HEADERS, self.number, _BEGINNING))

    def _end_with(self, block: bytes) -> None:
        if self._over:
            return
        self._over = True
        self._connection.write(h2.frame(h2.HEADERS, h2.END_HEADERS | h2.END_STREAM, self.number, block))
        if not self._ended:  # or the client would go on sending
            self._connection.write(h2.reset(self.number, ErrorCode.NONE))
        self._stop()
        self._connection.closed(self, by_us=not self._ended)

    def _fail(self, code: str, details: str) -> None:
        self.finish(code, details)
        self._cancel()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._waiting.clear()
        self.unsent, self.stuck = 0, None
        self._connection.shared.held -= self._counted
        self._counted = 0
        self._message = None
        self._ready.clear()
        if self._writer is not None and not self._writer.done():
            self._writer.set_result(None)
