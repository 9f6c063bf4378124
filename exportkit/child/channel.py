"""Messages of bytes, and open files, between two processes on one machine."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Sequence

_LENGTH = struct.Struct("!I")
_MAX_BYTES = 16 << 20  # of one message: names, shapes and texts
_FILE = struct.Struct("i")
_ANCILLARY_BYTES = socket.CMSG_LEN(3 * _FILE.size)  # at most three files come with a message


class Channel:
    """One end of a connected Unix stream socket, on which each message follows its length. `close` closes the socket.

    `deadline` is the `time.monotonic` at which sending and receiving give up with a TimeoutError. None waits for ever.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self.deadline: float | None = None

    def send(self, body: bytes, files: Sequence[int] = ()) -> None:
        """Sends a message, and open files for the other process to have as well.

        ConnectionError: the other process closed its end, or ended. TimeoutError: the deadline passed.
        """
        data = _LENGTH.pack(len(body)) + body
        self._set_timeout()
        sent = socket.send_fds(self._socket, [data], files) if files else self._socket.send(data)
        if sent < len(data):
            self._socket.sendall(data[sent:])

    def receive(self) -> tuple[bytes, list[int]]:
        """The next message, and the open files that came with it, which are the caller's to close.

        Errors are those of `send`, and ValueError: the message is longer than any of ours.
        """
        self._set_timeout()
        # Not socket.recv_fds, which drops the flag: a program that this process starts would have the files open too.
        header, ancillary, _, _ = self._socket.recvmsg(_LENGTH.size, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
        files = [file for _, _, data in ancillary for (file,) in _FILE.iter_unpack(data)]
        try:
            header += self._receive_exactly(_LENGTH.size - len(header))
            (length,) = _LENGTH.unpack(header)
            if length > _MAX_BYTES:
                raise ValueError(f"a message of {length} bytes; at most {_MAX_BYTES} are read")
            return self._receive_exactly(length), files
        except BaseException:
            for file in files:
                os.close(file)
            raise

    def shut_down(self) -> None:
        """Ends the conversation for both sides, even while another thread waits for an answer."""
        with contextlib.suppress(OSError):  # the other side was faster
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes our end. The other side notices, unless a forked process still has the socket open."""
        self._socket.close()

    def _receive_exactly(self, count: int) -> bytes:
        received = bytearray(count)
        at = 0
        while at < count:
            self._set_timeout()
            got = self._socket.recv_into(memoryview(received)[at:])
            if not got:
                raise ConnectionResetError("the other process closed the connection")
            at += got
        return bytes(received)

    def _set_timeout(self) -> None:
        """Gives the next step on the socket what is left of the time."""
        if self.deadline is not None:
            # 0 would mean not to wait at all, which raises another error.
            self._socket.settimeout(max(self.deadline - time.monotonic(), 1e-3))
        elif self._socket.gettimeout() is not None:
            self._socket.settimeout(None)
