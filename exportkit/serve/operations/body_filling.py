"""Receives a body into memory that the application chose."""

from __future__ import annotations

import asyncio
import os
import select
import time
from collections.abc import Callable

_LARGE = 4 << 20  # bytes of a body that are missing, from which another thread receives it
_FAST = 128 << 10  # bytes that came at once, by which a client is fast enough for that
_PAUSE = 2  # milliseconds without data after which the event loop waits for the client, and no thread
_THREAD_SLICE_SECONDS = 0.1  # after which the event loop looks at a fast client, too


class BodyFilling:
    """A body on its way into memory.

    The rest of a large body is received in another thread, as long as its client sends without a pause. One thread
    receives about 3 GB a second, and whoever else needs the event loop would wait.

    Attributes:
        memory: Where to. Not larger than the rest of the body.
        size: The bytes that came.
        wanted: Whether somebody waits for it.
        in_thread: Whether another thread receives.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        memory: memoryview,
        came: Callable[[int], None],
        over: Callable[[bool], None],
    ) -> None:
        """Begins.

        Args:
            transport: The connection.
            memory: Where to.
            came: Called for each part with its size.
            over: Called at the end, if it is wanted until then: whether the memory is full. If not, the client went
                away.
        """
        self._transport = transport
        self._came = came
        self._over = over
        self.memory = memory
        self.size = 0
        self.wanted = True
        self.in_thread = False

    @property
    def missing(self) -> memoryview:
        """The memory for what comes next."""
        return self.memory[self.size :]

    def received(self, size: int) -> bool:
        """Takes what came into `missing`. Returns whether the memory is full."""
        self.size += size
        self._came(size)
        return self.size == len(self.memory)

    def end(self, whole: bool) -> None:
        """Nothing more comes."""
        if self.wanted:
            self.wanted = False
            self._over(whole)

    def goes_on_in_thread(self, size: int, finished: Callable[[asyncio.Future[int]], None]) -> None:
        """Lets another thread receive for a while if so much came at once that it pays.

        Args:
            size: The bytes that came last.
            finished: Called with the number of bytes that the thread received. The transport has paused until then.
        """
        if size < _FAST or len(self.missing) < _LARGE or self._transport.get_extra_info("ssl_object") is not None:
            return
        try:
            # The connection may be closed meanwhile, and another opened with the same number.
            descriptor = os.dup(self._transport.get_extra_info("socket").fileno())
        except OSError:  # as many files are open as may be
            return
        self._transport.pause_reading()
        self.in_thread = True
        asyncio.get_running_loop().run_in_executor(None, _receive, descriptor, self).add_done_callback(finished)


def _receive(descriptor: int, body: BodyFilling) -> int:
    """Receives what comes without a pause, and closes the descriptor. Returns the bytes that came.

    The end of the connection and errors are left to the event loop, which meets them again.
    """
    missing, size, until = body.missing, 0, time.monotonic() + _THREAD_SLICE_SECONDS
    waiting = select.poll()
    waiting.register(descriptor, select.POLLIN)
    try:
        while size < len(missing) and body.wanted and time.monotonic() < until:
            try:
                count = os.readv(descriptor, [missing[size:]])
            except BlockingIOError:
                if not waiting.poll(_PAUSE):
                    break
                continue
            except OSError:
                break
            if not count:
                break
            size += count
    finally:
        os.close(descriptor)
    return size
