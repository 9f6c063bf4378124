"""Blocks of header fields, which come in several frames."""

from __future__ import annotations

from typing import NamedTuple

import hpack

from exportkit.serve.rpc import http2_frames as h2
from exportkit.serve.rpc.http2_frames import ConnectionProblemError, ErrorCode
from exportkit.serve.rpc.http2_rules import Fields

HEADER_BYTES = 64 << 10
_PRIORITY_BYTES = 5


class Headers(NamedTuple):
    """Header fields that are complete.

    Attributes:
        number: The stream.
        ended: Whether its client sends nothing more.
        fields: The fields.
    """

    number: int
    ended: bool
    fields: Fields


class HeaderBlocks:
    """The header fields of a connection.

    Attributes:
        incomplete: Whether a frame CONTINUATION must come next.
    """

    def __init__(self) -> None:
        self._decoder = hpack.Decoder(max_header_list_size=HEADER_BYTES)
        self.incomplete = False
        self._number = self._flags = 0
        self._block = bytearray()
        self._last: tuple[bytes, Fields] | None = None  # a block that says the same if it comes next, and what it says

    def begin(self, flags: int, number: int, payload: bytes) -> Headers | None:
        """Reads a frame HEADERS. Returns the fields if it has all. Raises ConnectionProblemError."""
        start, end = without_padding(payload, 0, len(payload)) if flags & h2.PADDED else (0, len(payload))
        if flags & h2.HAS_PRIORITY:
            start += _PRIORITY_BYTES
            if start > end:
                raise ConnectionProblemError(ErrorCode.FRAME_SIZE, "a frame of headers is too short")
        self._number, self._flags, self._block = number, flags, bytearray(payload[start:end])
        return self._read(flags)

    def go_on(self, flags: int, number: int, payload: bytes) -> Headers | None:
        """Reads a frame CONTINUATION. See `begin`."""
        if not self.incomplete or number != self._number:
            raise ConnectionProblemError(ErrorCode.PROTOCOL, "a continuation came of no headers")
        self._block += payload
        if len(self._block) > HEADER_BYTES:
            raise _too_many()
        return self._read(flags)

    def _read(self, flags: int) -> Headers | None:
        self.incomplete = not flags & h2.END_HEADERS
        if self.incomplete:
            return None
        block, self._block = bytes(self._block), bytearray()
        if self._last is None or self._last[0] != block:
            before = self._table()
            fields = self._decoded(block)
            now = self._table()
            unchanged = now[0] is before[0] and now == before
            self._last = (block, list(fields)) if unchanged else None
        else:
            fields = list(self._last[1])
        return Headers(self._number, bool(self._flags & h2.END_STREAM), fields)

    def _table(self) -> tuple[object, ...]:
        """Returns what is another object once a block has changed the table, after which it may say something else.

        What is added becomes the first entry. Without that, entries leave the table only when it becomes smaller.
        """
        table = self._decoder.header_table
        entries = table.dynamic_entries
        return entries[0] if entries else None, table.maxsize, len(entries)

    def _decoded(self, block: bytes) -> Fields:
        try:
            fields = self._decoder.decode(block, raw=True)
        except hpack.OversizedHeaderListError:
            raise _too_many() from None
        except hpack.HPACKError as error:
            raise ConnectionProblemError(ErrorCode.COMPRESSION, f"headers cannot be read: {error}") from None
        return [(bytes(name), bytes(value)) for name, value in fields]


def without_padding(data: bytes, start: int, end: int) -> tuple[int, int]:
    """Returns the ends of a frame's content. Raises ConnectionProblemError."""
    if start == end or start + 1 + data[start] > end:
        raise ConnectionProblemError(ErrorCode.PROTOCOL, "a frame has more padding than bytes")
    return start + 1, end - data[start]


def _too_many() -> ConnectionProblemError:
    return ConnectionProblemError(ErrorCode.TOO_MUCH, f"headers have more than {HEADER_BYTES} bytes")
