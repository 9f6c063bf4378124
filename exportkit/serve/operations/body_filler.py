"""Receives a body into memory that the application chose."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol


class Connection(Protocol):
    """The protocol that the transport had before, and will have again."""

    def body_filled(self) -> None:
        """The body is complete."""

    def eof_received(self) -> None:
        """The client sends no more."""

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection was closed."""

    def pause_writing(self) -> None:
        """The client takes its answer slowly."""

    def resume_writing(self) -> None:
        """The client took most of it."""


class BodyFiller(asyncio.BufferedProtocol):
    """Takes the place of the HTTP protocol until the memory is full. What the client sends after that stays unread.

    Attributes:
        done: Becomes True when the memory is full, False when the client went away before.
    """

    def __init__(self, connection: Connection, memory: memoryview, came: Callable[[int], None]) -> None:
        """`came` is called with the size of each part."""
        self._connection = connection
        self._memory = memory
        self._size = 0
        self._came = came
        self.done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    @property
    def came(self) -> bytes:
        """What came so far."""
        return bytes(self._memory[: self._size])

    def get_buffer(self, sizehint: int) -> memoryview:
        """Returns the memory that is not filled yet."""
        return self._memory[self._size :]

    def buffer_updated(self, nbytes: int) -> None:
        """Counts."""
        self._size += nbytes
        self._came(nbytes)
        if self._size == len(self._memory):
            self._connection.body_filled()
            self._end(True)

    def eof_received(self) -> None:
        """The client sends no more."""
        self._connection.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection was closed."""
        self._connection.connection_lost(exc)
        self._end(False)

    def pause_writing(self) -> None:
        """The client takes its answer slowly."""
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        """The client took most of it."""
        self._connection.resume_writing()

    def _end(self, whole: bool) -> None:
        if not self.done.done():
            self.done.set_result(whole)
