"""Work in a thread that ends with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


async def in_own_thread(function: Callable[..., T], *args: object) -> T:
    """Runs a function that calls models, in a thread of its own.

    What torch and its libraries keep for each thread, such as the scratch memory of oneDNN's convolutions, is freed
    when the thread ends. The threads of `asyncio.to_thread` never end, and there are up to 32 of them. And a library
    of compiled code that was called in a thread stays mapped as long as the thread lives.
    """
    executor = ThreadPoolExecutor(1, thread_name_prefix="exportkit loader")
    try:
        return await asyncio.get_running_loop().run_in_executor(executor, function, *args)
    finally:
        executor.shutdown(wait=False)
