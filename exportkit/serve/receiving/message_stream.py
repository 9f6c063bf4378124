"""Messages with bytes behind them, over a Unix socket in an event loop."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import msgspec

from exportkit.serve.receiving.receiver_messages import ReceiverMessage, encode

M = TypeVar("M", bound=ReceiverMessage)

_log = logging.getLogger(__name__)

_SIZES = struct.Struct("!IQ")  # of the message and of the bytes behind it


class MessageStream(asyncio.Protocol, Generic[M]):
    """One end of the connection."""

    _transport: Any  # uvloop's are not asyncio's

    def __init__(
        self,
        decoder: msgspec.msgpack.Decoder[M],
        received: Callable[[M, memoryview], None],
        ended: Callable[[], None],
    ) -> None:
        """Use `connect`.

        Args:
            decoder: Reads the other side's messages.
            received: Called with each message and the bytes behind it, which stay as they are.
            ended: Called once the other side closed the connection or ended.
        """
        self._decoder = decoder
        self._received = received
        self._ended = ended
        self._rest = bytearray()  # the beginning of a frame

    async def connect(self, connection: socket.socket) -> None:
        """Takes over a connected socket."""
        connection.setblocking(False)
        await asyncio.get_running_loop().create_connection(lambda: self, sock=connection)

    def send(self, message: ReceiverMessage, behind: Iterable[memoryview] = ()) -> None:
        """Sends a message. What is behind it must not change until it is sent."""
        encoded = encode(message)
        parts = [part for part in behind if part.nbytes]
        sizes = _SIZES.pack(len(encoded), sum(part.nbytes for part in parts))
        if self._transport.is_closing():
            return
        if parts:
            self._transport.writelines([sizes + encoded, *parts])
        else:
            self._transport.write(sizes + encoded)

    def close(self) -> None:
        """Closes the connection once everything was sent."""
        self._transport.close()

    # --- asyncio's protocol -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is ours."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Reads the frames that are complete."""
        if self._rest:
            self._rest += data
            if not self._has_frame():
                return
            data, self._rest = bytes(self._rest), bytearray()
        taken = self._read_frames(memoryview(data))
        self._rest += memoryview(data)[taken:]

    def connection_lost(self, exc: Exception | None) -> None:
        """The other side is gone, or we closed."""
        self._ended()

    def _has_frame(self) -> bool:
        """Whether the first frame is complete."""
        return len(self._rest) >= _SIZES.size and len(self._rest) >= _SIZES.size + sum(_SIZES.unpack_from(self._rest))

    def _read_frames(self, data: memoryview) -> int:
        """Hands out the complete frames. Returns the number of bytes that they have."""
        start = 0
        while len(data) - start >= _SIZES.size:
            length, behind = _SIZES.unpack_from(data, start)
            begin = start + _SIZES.size
            end = begin + length + behind
            if end > len(data):
                break
            try:
                self._received(self._decoder.decode(data[begin : begin + length]), data[begin + length : end])
            except Exception:  # whatever it is: after it, nothing that the other side says can be relied on
                _log.exception("a message cannot be understood, so the connection ends")
                self._transport.abort()
                return len(data)
            start = end
        return start
