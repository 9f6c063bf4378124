"""Requests of one stream that run together, and are answered in their order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any


async def answers_in_order(
    read: Callable[[], Awaitable[bytes | None]], answer: Callable[[bytes], Awaitable[bytes]], most: int
) -> AsyncIterator[bytes]:
    """Yields the answers to the requests of a stream. If this is closed or cancelled, so is what runs.

    Args:
        read: Returns the next request; None after the last.
        answer: Answers a request. What it raises ends the stream.
        most: The number of requests that run together. The next is read when the first of them is answered.
    """
    running: deque[asyncio.Future[bytes]] = deque()
    reading: asyncio.Future[bytes | None] | None = asyncio.ensure_future(read())
    try:
        while reading is not None or running:
            watched: list[asyncio.Future[Any]] = list(running)[:1]
            if reading is not None and len(running) < most:
                watched.append(reading)
            await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            if reading is not None and reading.done() and len(running) < most:
                request = reading.result()
                if request is None:
                    reading = None
                else:
                    running.append(asyncio.ensure_future(answer(request)))
                    reading = asyncio.ensure_future(read())
                del request
            while running and running[0].done():
                yield running.popleft().result()
    finally:
        left: list[asyncio.Future[Any]] = [*running, *([] if reading is None else [reading])]
        for future in left:
            future.cancel()
        await asyncio.gather(*left, return_exceptions=True)
