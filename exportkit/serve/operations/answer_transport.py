"""Sends the head of an answer together with the beginning of its body."""

from __future__ import annotations

import asyncio

_COPIED = 64 << 10  # bytes of a body up to which it is copied behind the head


class AnswerTransport:
    """The part of a connection's transport that the answer to one request needs.

    uvicorn writes the head and the body one after the other, and uvloop sends each at once: two system calls, during
    which no other thread of Python runs, and two packets that wake the client. So the head waits for the body, but not
    for longer than the rest of the event loop's turn.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        """Nothing was written."""
        self._transport = transport
        self._loop = loop
        self._head: bytes | None = None
        self._began = False

    def write(self, data: bytes | memoryview) -> None:
        """Writes what comes first soon, and everything else at once."""
        if not self._began:
            self._began = True
            self._head = bytes(data)
            self._loop.call_soon(self._flush)
        elif self._head is None:
            self._transport.write(data)
        elif data:
            head, self._head = self._head, None
            if len(data) <= _COPIED:
                self._transport.write(head + data)
            else:
                self._transport.writelines([head, data])

    def close(self) -> None:
        """Closes the connection when everything was sent."""
        self._flush()
        self._transport.close()

    def is_closing(self) -> bool:
        """Whether the connection is closed or will be."""
        return self._transport.is_closing()

    def _flush(self) -> None:
        head, self._head = self._head, None
        if head is not None:
            self._transport.write(head)
