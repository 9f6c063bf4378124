"""Calls beside one another."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any


@contextlib.contextmanager
def beside(call: Callable[[Any], object], arguments: Iterable[Any]) -> Iterator[None]:
    """Calls it with each of the arguments in a thread of its own while the block runs, and raises what they raise."""
    given = list(arguments)
    with ThreadPoolExecutor(len(given)) as pool:
        calls = [pool.submit(call, each) for each in given]
        yield
        for each in calls:
            each.result()


def together(call: Callable[[Any], object], arguments: Iterable[Any]) -> None:
    """Calls it with each of the arguments in a thread of its own, and raises what they raise."""
    with beside(call, arguments):
        pass
