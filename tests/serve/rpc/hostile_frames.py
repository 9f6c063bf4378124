"""Connections of HTTP/2 as clients make them, and as strangers do: made from a grammar, and fed to the protocol."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from exportkit.serve.rpc import http2_connection
from exportkit.serve.rpc import http2_frames as h2
from exportkit.serve.rpc.http2_connection import Connections, Http2Connection
from tests.serve.rpc.frame_judge import Judge, WrongFrameError
from tests.serve.rpc.raw_http2 import INFER, READY, STREAM, head, prefixed

SECONDS_OF_A_CONNECTION = 3.0  # of this thread, for at most some hundred KiB
_NO_GREETINGS = [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\0\1", h2.PREFACE[:10], h2.PREFACE]
_NUMBERS = [0, 1, 2, 3, 5, 7, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1]


class Wire:
    """A transport in memory."""

    def __init__(self, judge: Judge) -> None:
        self.judge = judge
        self.closing = False
        self.wrong: WrongFrameError | None = None

    def write(self, data: bytes) -> None:
        try:
            if not self.closing:
                self.judge.read(bytes(data))
        except WrongFrameError as error:  # nobody would see it in a callback of the loop
            self.wrong = self.wrong or error

    def writelines(self, parts: Sequence[Any]) -> None:
        self.write(b"".join(parts))

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    abort = close

    def get_extra_info(self, name: str) -> Any:
        return ("192.0.2.1", 1) if name == "peername" else None


class Session:
    """A client's connection: it sends what the grammar says, and knows what it may get."""

    def __init__(
        self, chance: random.Random, requests: Sequence[bytes], *, hostile: bool, sequences: bool = False
    ) -> None:
        """`sequences`: the requests are steps of sequences, which other calls may end."""
        self.chance, self.requests, self.hostile = chance, requests, hostile
        self.statuses = {"0", "9"} if sequences else {"0"}
        self.judge = Judge()
        self.whole: dict[int, int] = {}  # unary calls that were sent completely, and their requests' sizes
        self._next = 1
        self._open: dict[int, str] = {}
        self._valid: list[tuple[int, Callable[[], bytes]]] = [
            (8, self._call), (4, self._begin), (8, self._data), (3, self._end), (2, self._reset), (2, self._trailers),
            (2, self._ping), (2, self._settings), (3, self._window), (1, self._priority), (1, self._unknown),
        ]  # fmt: skip
        self._hostile = [
            (6, self._mutated), (3, self._random), (1, self._flood), (1, self._large_headers), (1, self._bomb),
            (1, self._table), (2, self._late), (1, self._overflow), (1, self._garbage), (1, self._goodbye),
        ]  # fmt: skip

    def parts(self) -> list[bytes]:
        """Returns what is sent, with the greeting."""
        start = [h2.PREFACE + self._settings()]
        if self.hostile and self.chance.random() < 0.03:
            start = [
                self.chance.choice([b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\0\1", h2.PREFACE[:10], h2.PREFACE])
            ]
        return start

    def step(self) -> bytes:
        """Returns the next frames."""
        kinds = self._valid + (self._hostile if self.hostile else [])
        make = self.chance.choices([make for _, make in kinds], [weight for weight, _ in kinds])[0]
        self.judge.knows_windows &= all(make != hostile for _, hostile in self._hostile)
        return make()

    def finish(self) -> bytes:
        """Returns what lets all answers come."""
        self.judge.settings(1 << 20)
        self.judge.window += 1 << 24
        return h2.settings([(h2.INITIAL_WINDOW_SIZE, 1 << 20)]) + h2.window_update(0, 1 << 24)

    # --- what is right ------------------------------------------------------------------------------------------------

    def _head(self, number: int, path: str, *, end: bool = False) -> bytes:
        block, chance = head(path), self.chance
        flags, before, behind = h2.END_STREAM * end, b"", b""
        if chance.random() < 0.2:
            behind = bytes(chance.randrange(20))
            flags, before = flags | h2.PADDED, bytes([len(behind)])
        if chance.random() < 0.2:
            flags, before = flags | h2.HAS_PRIORITY, before + bytes(5)
        self.judge.opened(number)
        if chance.random() < 0.7:
            return h2.frame(h2.HEADERS, flags | h2.END_HEADERS, number, before + block + behind)
        cuts = sorted(chance.randrange(len(block)) for _ in range(chance.randrange(1, 4)))
        pieces = [block[a:b] for a, b in zip([0, *cuts], [*cuts, len(block)])]
        found = h2.frame(h2.HEADERS, flags, number, before + pieces[0] + behind)
        for piece in pieces[1:-1]:
            found += h2.frame(h2.CONTINUATION, 0, number, piece)
        return found + h2.frame(h2.CONTINUATION, h2.END_HEADERS, number, pieces[-1])

    def _number(self) -> int:
        number = self._next
        self._next += self.chance.choice([2, 2, 2, 4])
        return number

    def _pieces(self, data: bytes, number: int, *, end: bool) -> bytes:
        found, at = b"", 0
        while at < len(data):
            size = self.chance.choice([1, 5, 14, 100, 1000, h2.MOST_FRAME - 40])
            part, flags, at = data[at : at + size], 0, at + size
            if self.chance.random() < 0.1:
                part, flags = b"\2" + part + b"\0\0", h2.PADDED
            found += h2.frame(h2.DATA, flags | h2.END_STREAM * (end and at >= len(data)), number, part)
        return found

    def _call(self) -> bytes:
        number, message = self._number(), self.chance.choice(self.requests)
        self.whole[number] = len(message)
        return self._head(number, INFER) + self._pieces(prefixed(message), number, end=True)

    def _begin(self) -> bytes:
        number, path = self._number(), self.chance.choice([INFER, STREAM, STREAM, STREAM, READY, "/nothing"])
        end = self.chance.random() < 0.1
        if not end and path == STREAM:  # others are answered at once, or want one message
            self._open[number] = path
        return self._head(number, path, end=end)

    def _data(self) -> bytes:
        if not self._open:
            return b""
        number = self.chance.choice(list(self._open))
        messages = b"".join(prefixed(self.chance.choice(self.requests)) for _ in range(self.chance.randrange(1, 4)))
        return self._pieces(messages, number, end=False)

    def _end(self) -> bytes:
        if not self._open:
            return b""
        number = self.chance.choice(list(self._open))
        del self._open[number]
        return h2.frame(h2.DATA, h2.END_STREAM, number)

    def _trailers(self) -> bytes:
        if not self._open:
            return b""
        number = self.chance.choice(list(self._open))
        del self._open[number]
        return h2.frame(h2.HEADERS, h2.END_STREAM | h2.END_HEADERS, number, h2.fields([("x", "y")]))

    def _reset(self) -> bytes:
        if not self._open:
            return b""
        number = self.chance.choice(list(self._open))
        del self._open[number]
        return h2.reset(number, h2.ErrorCode.CANCEL)

    def _ping(self) -> bytes:
        self.judge.sent["pings"] += 1
        return h2.frame(h2.PING, payload=self.chance.randbytes(8))

    def _settings(self) -> bytes:
        values, window = [], None
        if self.chance.random() < 0.5:
            window = self.chance.choice([0, 1, 10, 1000, 1 << 16, 1 << 20])
            values.append((h2.INITIAL_WINDOW_SIZE, window))
        if self.chance.random() < 0.2:
            values += [(h2.HEADER_TABLE_SIZE, self.chance.choice([0, 4096, 1 << 20])), (0x77, 1)]
        self.judge.settings(window)
        return h2.settings(values)

    def _window(self) -> bytes:
        more = self.chance.choice([1, 10, 1000, 1 << 16])
        if self._open and self.chance.random() < 0.7:
            number = self.chance.choice(list(self._open))
            self.judge.streams[number].window += more
            return h2.window_update(number, more)
        self.judge.window += more
        return h2.window_update(0, more)

    def _priority(self) -> bytes:
        return h2.frame(h2.PRIORITY, 0, self.chance.choice([1, 3, 999]), bytes(5))

    def _unknown(self) -> bytes:
        return h2.frame(self.chance.randrange(10, 256), self.chance.randrange(256), 0, self.chance.randbytes(9))

    # --- what is not --------------------------------------------------------------------------------------------------

    def _mutated(self) -> bytes:
        """A right frame with damages; the judge does not know of it."""
        saved, opened = self.judge, dict(self._open)
        self.judge = Judge()
        self.judge.streams = dict(saved.streams)
        data = bytearray(self.chance.choice([self._call, self._begin, self._data, self._settings, self._window])())
        self.judge, self._open = saved, opened
        for _ in range(self.chance.randrange(1, 4)):
            at = self.chance.randrange(len(data) + 1)
            damage = self.chance.randrange(5)
            if damage == 0 and data:
                data[at : at + 1] = self.chance.randbytes(1)
            elif damage == 1:
                del data[at : at + self.chance.randrange(1, 9)]
            elif damage == 2:
                data[at:at] = data[: self.chance.randrange(40)]
            elif len(data) > 9:  # the head of the first frame
                field = self.chance.choice([(0, 3), (3, 4), (4, 5), (5, 9)])
                value = self.chance.choice([*_NUMBERS, len(data)])
                data[field[0] : field[1]] = (value & (1 << 8 * (field[1] - field[0])) - 1).to_bytes(
                    field[1] - field[0], "big"
                )
        return bytes(data)

    def _random(self) -> bytes:
        payload = self.chance.randbytes(self.chance.choice([0, 1, 4, 5, 6, 8, 9, 100]))
        number = self.chance.choice([*_NUMBERS, self._next])
        return h2.frame(self.chance.randrange(11), self.chance.randrange(256), number & 0xFFFFFFFF, payload)

    def _flood(self) -> bytes:
        frames = [
            h2.frame(h2.PING, payload=bytes(8)),
            h2.settings([(h2.INITIAL_WINDOW_SIZE, n % 2) for n in range(self.chance.choice([1, 2000]))]),
            h2.window_update(0, 1),
            h2.frame(h2.PRIORITY, 0, 1, bytes(5)),
            h2.frame(h2.DATA, 0, 1),
            h2.reset(1, h2.ErrorCode.CANCEL),
            h2.frame(h2.HEADERS, 0, self._next) + h2.frame(h2.CONTINUATION, 0, self._next) * 50,
        ]
        frame = self.chance.choice(frames)
        return frame * min(self.chance.choice([10, 300, 11_000]), (400 << 10) // len(frame))

    def _large_headers(self) -> bytes:
        number = self._number()
        block = head(STREAM, *[(f"x{n}", "v" * 1000) for n in range(self.chance.choice([10, 60, 100]))])
        first, rest = block[:16000], block[16000:]
        found = h2.frame(h2.HEADERS, 0, number, first)
        for at in range(0, len(rest), 16000):
            found += h2.frame(h2.CONTINUATION, 0, number, rest[at : at + 16000])
        return found + h2.frame(h2.CONTINUATION, h2.END_HEADERS, number)

    def _bomb(self) -> bytes:
        field = b"\x40\1x\x7f\xa1\x1e" + b"v" * 4000
        block = head(STREAM) + field + b"\xbe" * self.chance.choice([1, 10, 15, 17, 4000])
        return h2.frame(h2.HEADERS, h2.END_HEADERS, self._number(), block[: h2.MOST_FRAME])

    def _table(self) -> bytes:
        sizes = [b"\x20", b"\x3f\xe1\x1f", b"\x3f\xe2\x1f", b"\x3f\xff\xff\xff\xff\x0f", b"\x3f" + b"\xff" * 30]
        block = (
            b"".join(self.chance.choice(sizes[:2]) for _ in range(3)) + self.chance.choice([b"", *sizes]) + head(READY)
        )
        return h2.frame(h2.HEADERS, h2.END_HEADERS | h2.END_STREAM, self._number(), block)

    def _late(self) -> bytes:
        """Frames of streams that are over, or that never were."""
        number = self.chance.choice([*range(1, self._next + 4)])
        late = [
            h2.frame(h2.DATA, self.chance.choice([0, 1]), number, prefixed(b"x")),
            h2.frame(h2.HEADERS, 5, number, head()),
            h2.reset(number, h2.ErrorCode.CANCEL),
            h2.window_update(number, 1),
        ]
        return self.chance.choice(late)

    def _overflow(self) -> bytes:
        return h2.window_update(self.chance.choice([0, *self._open]), self.chance.choice([0, h2.MOST_WINDOW]))

    def _garbage(self) -> bytes:
        return self.chance.randbytes(self.chance.choice([1, 9, 50, 3000]))

    def _goodbye(self) -> bytes:
        return h2.frame(h2.GOAWAY, payload=bytes(self.chance.choice([8, 100])))


async def play(setup: Connections, session: Session, steps: int) -> None:
    """Feeds a session to the protocol. Raises what it raises, or AssertionError where a promise is broken."""
    chance, judge = session.chance, session.judge
    protocol, wire = Http2Connection(setup), Wire(judge)
    protocol.connection_made(wire)
    paused, spent = False, 0.0
    parts = [*session.parts(), *(None for _ in range(steps)), b"end"]
    for part in parts:
        data = session.step() if part is None else session.finish() if part == b"end" else part
        at = 0
        while at < len(data) and not wire.closing:
            size = chance.choice([1, 9, 100, 1 << 16]) if chance.random() < 0.1 else len(data)
            began = time.thread_time()
            protocol.data_received(data[at : at + size])
            spent += time.thread_time() - began
            at += size
        if wire.closing:
            break
        if chance.random() < 0.05:
            paused = not paused
            (protocol.pause_writing if paused else protocol.resume_writing)()
        if chance.random() < 0.3:
            await asyncio.sleep(0)
            protocol.look(asyncio.get_running_loop().time())
    if paused and not wire.closing:
        protocol.resume_writing()
    if not session.hostile:
        await _answered(session, wire)
    protocol.flush()
    assert spent < SECONDS_OF_A_CONNECTION, f"{spent:.1f} s for one connection"
    assert len(protocol.streams) <= http2_connection._MOST_STREAMS
    assert setup.held <= setup.max_held + (64 << 10)
    protocol.connection_lost(None)
    if wire.wrong is not None:
        raise wire.wrong
    assert setup.held >= 0


async def _answered(session: Session, wire: Wire) -> None:
    """All that was right is answered."""
    judge = session.judge
    for _ in range(2000):  # of milliseconds
        if all(number in judge.streams and judge.streams[number].ended for number in session.whole):
            break
        await asyncio.sleep(0.001)
    await asyncio.sleep(0)  # what was written is sent
    assert not wire.closing, f"the connection ended with {judge.went}"
    if wire.wrong is not None:
        raise wire.wrong
    for number, size in session.whole.items():
        answer = judge.streams[number]
        assert answer.ended, f"call {number} of {size} bytes has no answer"
        assert answer.headers[-1].get("grpc-status") in session.statuses, answer.headers
    judge.done()
