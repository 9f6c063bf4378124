"""What RFC 9113 forbids in a frame, whatever stream it is of, and in the fields of a request."""

from __future__ import annotations

import re
from collections.abc import Sequence

from exportkit.serve.rpc import http2_frames as h2
from exportkit.serve.rpc.http2_frames import ConnectionProblemError, ErrorCode, StreamProblemError

_OF_A_STREAM = {h2.HEADERS, h2.PRIORITY, h2.RST_STREAM, h2.CONTINUATION}
_OF_THE_CONNECTION = {h2.SETTINGS, h2.PING, h2.GOAWAY}
_SIZES = {h2.RST_STREAM: 4, h2.PING: 8, h2.WINDOW_UPDATE: 4}
_LEAST_GOODBYE, _SETTING, _PRIORITY = 8, 6, 5
_LARGEST_FRAME = (1 << 24) - 1

_NAME = re.compile(rb"[!-9;-@\[-~]+")  # no capitals, no colon
_BAD_VALUE = re.compile(rb"[\0\r\n]|\A[ \t]|[ \t]\Z")
_LENGTH = re.compile(rb"[0-9]{1,18}")
_PSEUDO = {b":method", b":scheme", b":path", b":authority"}
_NEEDED = {b":method", b":scheme", b":path"}
_OF_HTTP_1 = {b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade"}

Fields = Sequence[tuple[bytes, bytes]]


def check_frame(kind: int, flags: int, number: int, size: int) -> None:
    """Checks a frame that is none of data: its stream and its size.

    Raises:
        ConnectionProblemError, StreamProblemError: It breaks a rule.
    """
    if (kind in _OF_A_STREAM and not number) or (kind in _OF_THE_CONNECTION and number):
        raise ConnectionProblemError(ErrorCode.PROTOCOL, f"a frame of kind {kind} is of stream {number}")
    wrong = _SIZES.get(kind, size) != size
    if kind == h2.SETTINGS:
        wrong = bool(size) if flags & h2.ACK else size % _SETTING > 0
    elif kind == h2.GOAWAY:
        wrong = size < _LEAST_GOODBYE
    elif kind == h2.PRIORITY and size != _PRIORITY:
        raise StreamProblemError(ErrorCode.FRAME_SIZE, number)
    if wrong:
        raise ConnectionProblemError(ErrorCode.FRAME_SIZE, f"a frame of kind {kind} has {size} bytes")


def check_setting(key: int, value: int) -> None:
    """Checks a setting. Raises ConnectionProblemError."""
    if key == h2.INITIAL_WINDOW_SIZE and value > h2.MOST_WINDOW:
        raise ConnectionProblemError(ErrorCode.FLOW_CONTROL, "a window is larger than it may be")
    if (key == h2.MAX_FRAME_SIZE and not h2.MOST_FRAME <= value <= _LARGEST_FRAME) or (
        key == h2.ENABLE_PUSH and value > 1
    ):
        raise ConnectionProblemError(ErrorCode.PROTOCOL, f"the setting {key} may not be {value}")


def why_malformed(fields: Fields, *, trailers: bool) -> str | None:
    """Returns why the fields of a request, or those behind it, are none; None: they are."""
    pseudo: set[bytes] = set()
    plain = trailers
    for name, value in fields:
        if name.startswith(b":"):
            if plain or name not in _PSEUDO or name in pseudo:
                return "a pseudo-field is unknown, comes twice, or comes late"
            pseudo.add(name)
            if name == b":path" and not value:
                return "the path is empty"
            continue
        plain = True
        if not _NAME.fullmatch(name) or name in _OF_HTTP_1 or (name == b"te" and value != b"trailers"):
            return "a field has a name or a value that HTTP/2 forbids"
        if _BAD_VALUE.search(value):
            return "a field has a value that HTTP forbids"
        if name == b"content-length" and not _LENGTH.fullmatch(value):
            return "content-length is no number"
    return None if trailers or pseudo >= _NEEDED else "a pseudo-field is missing"
