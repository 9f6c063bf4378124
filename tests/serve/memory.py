"""How many bytes Python's objects take."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class TracedMemory:
    """What was allocated in a context: the most at a time, and what is left at its end."""

    peak: int = 0
    left: int = 0


@contextmanager
def traced_memory() -> Iterator[TracedMemory]:
    """Measures what is allocated in a context. It is known after the context."""
    traced = TracedMemory()
    tracemalloc.start()
    try:
        yield traced
    finally:
        traced.left, traced.peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
