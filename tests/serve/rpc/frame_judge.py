"""Judges what a server writes on a connection of HTTP/2, as RFC 9113 tells its client to."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

import hpack

from exportkit.serve.rpc import http2_frames as h2

_FIRST_WINDOW = (1 << 16) - 1
_FORBIDDEN = {h2.PUSH_PROMISE, h2.PRIORITY, h2.CONTINUATION}


class WrongFrameError(AssertionError):
    """The server wrote what no server may."""


@dataclass
class Answer:
    """What came on a stream."""

    window: int
    data: bytes = b""
    headers: list[dict[str, str]] = field(default_factory=list)
    ended: bool = False
    reset: int | None = None


class Judge:
    """A client's side of a connection: it is told what was sent, and reads what comes.

    Attributes:
        streams: What came, by stream.
        went: The code of GOAWAY; None: there was none.
        knows_windows: Whether nothing was sent that may have changed them unseen.
    """

    def __init__(self) -> None:
        self.streams: dict[int, Answer] = {}
        self.went: int | None = None
        self.knows_windows = True
        self.window = _FIRST_WINDOW
        self.initial = _FIRST_WINDOW
        self.most_frame = h2.MOST_FRAME
        self.sent: Counter[str] = Counter()  # what the server has to confirm
        self.came: Counter[str] = Counter()
        self._unconfirmed: deque[tuple[int, list[Answer]]] = deque()
        self._decoder = hpack.Decoder()
        self._left = b""

    # --- what the client sends and the server has to keep to ----------------------------------------------------------

    def opened(self, number: int) -> None:
        self.streams.setdefault(number, Answer(self.initial))

    def settings(self, initial: int | None = None) -> None:
        """Settings are sent, with another window of streams or none.

        The server may use a larger one at once, and must keep to a smaller one when it has confirmed it.
        """
        more = 0 if initial is None else initial - self.initial
        self.initial += more
        for each in self.streams.values() if more > 0 else ():
            each.window += more
        self._unconfirmed.append((min(more, 0), list(self.streams.values())))
        self.sent["settings"] += 1

    def _confirmed(self) -> None:
        less, streams = self._unconfirmed.popleft() if self._unconfirmed else (0, [])
        for each in streams:
            each.window += less

    # --- what comes ---------------------------------------------------------------------------------------------------

    def read(self, data: bytes) -> None:
        """Reads what the server wrote. Raises WrongFrameError."""
        data = self._left + data
        at = 0
        while len(data) - at >= 9:
            packed, flags, number = h2.FRAME.unpack_from(data, at)
            end = at + 9 + (packed >> 8)
            if end > len(data):
                break
            self._frame(packed & 0xFF, flags, number, data[at + 9 : end])
            at = end
        self._left = data[at:]

    def done(self) -> None:
        """Nothing more comes. Raises WrongFrameError."""
        _need(not self._left, "the last frame is not complete")
        if self.went is None:
            for what in ("settings", "pings"):
                _need(self.came[what] == self.sent[what], f"{self.sent[what]} {what}, {self.came[what]} confirmed")

    def _frame(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        _need(kind < 10 and kind not in _FORBIDDEN, f"a frame of kind {kind}")
        _need(len(payload) <= self.most_frame or not self.knows_windows, f"a frame of {len(payload)} bytes")
        if kind in (h2.SETTINGS, h2.PING, h2.GOAWAY):
            _need(number == 0, f"kind {kind} of stream {number}")
            if kind == h2.GOAWAY:
                self.went = int.from_bytes(payload[4:8], "big")
            elif flags & h2.ACK:
                self.came["settings" if kind == h2.SETTINGS else "pings"] += 1
                if kind == h2.SETTINGS:
                    self._confirmed()
            return
        if kind == h2.WINDOW_UPDATE:
            _need(len(payload) == 4 and 0 < int.from_bytes(payload, "big") <= h2.MOST_WINDOW, "a window of nothing")
            return
        if kind == h2.RST_STREAM:
            _need(number % 2 == 1, "a reset of no stream")
            self.streams.setdefault(number, Answer(self.initial)).reset = int.from_bytes(payload, "big")
            return
        answer = self.streams.get(number)
        if answer is None:  # what the fuzzer broke may have opened it
            answer = self.streams[number] = Answer(self.initial)
        _need(not answer.ended, f"kind {kind} on stream {number} after its end")
        _need(answer.reset is None, f"kind {kind} on stream {number} after its reset")
        answer.ended = bool(flags & h2.END_STREAM)
        if kind == h2.HEADERS:
            _need(bool(flags & h2.END_HEADERS), "headers that go on")
            fields = [(str(name), str(value)) for name, value in self._decoder.decode(payload)]
            first = not answer.headers
            _need(first == (fields[0][0] == ":status"), f"headers {fields}")
            _need(first or answer.ended, "headers in the middle")
            answer.headers.append(dict(fields))
        else:
            _need(bool(answer.headers), "data before headers")
            answer.window -= len(payload)
            self.window -= len(payload)
            if payload and self.knows_windows:
                _need(answer.window >= 0, f"{-answer.window} bytes more than stream {number} takes")
                _need(self.window >= 0, f"{-self.window} bytes more than the connection takes")
            answer.data += payload


def _need(holds: bool, message: str) -> None:
    if not holds:
        raise WrongFrameError(message)
