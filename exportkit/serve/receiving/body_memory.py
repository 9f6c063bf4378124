"""The memory of a receiver's bodies, which the process with the models maps too."""

from __future__ import annotations

import bisect
import mmap
import weakref
from collections import deque

import numpy as np

from exportkit.child.sealed_memory import map_memory, new_memory
from exportkit.serve.protocol.tensors import ALIGNMENT
from exportkit.serve.statuses import QueueFullError

RESERVED_BYTES = 64 << 30
"""Addresses, not memory. What may wait is bounded by the limits of the models."""

_KEPT_BYTES = 256 << 20  # that stay allocated when nothing uses them
_PAGE = mmap.PAGESIZE


def new_body_memory(size: int) -> int:
    """Opens `size` bytes without memory yet. See `new_memory` for the result and for errors."""
    # An announced body may never come, so each page is taken when it is written. The model reads what was written.
    return new_memory("exportkit-bodies", size, allocated=False)


class MappedMemory:
    """The memory, seen by the process with the models."""

    def __init__(self, descriptor: int) -> None:
        """Maps the file. Raises OSError if a limit of this process forbids it."""
        self._bytes = np.frombuffer(map_memory(descriptor), np.uint8)

    def view(self, offset: int, size: int) -> np.ndarray:
        """Returns `size` bytes from `offset` as uint8[size]. They keep the mapping.

        Raises:
            ValueError: They leave the memory.
        """
        if not 0 <= offset <= offset + size <= self._bytes.size:
            raise ValueError(f"{size} bytes from {offset} of {self._bytes.size}")
        return self._bytes[offset : offset + size]


class BodyMemory:
    """Gives out parts of the memory. A part is free again when nothing refers to it."""

    def __init__(self, descriptor: int) -> None:
        """Maps the memory. The descriptor may be closed then."""
        self._map = map_memory(descriptor)
        self._bytes = np.frombuffer(self._map, np.uint8)
        self._address = int(self._bytes.__array_interface__["data"][0])
        self._parts = FreeParts(self._bytes.size)
        self._unused: deque[tuple[int, int]] = deque()  # the last reference may go in any thread, at any moment
        self._touched = 0  # so many bytes from the start may have memory

    def allocate(self, size: int, start: int = 0) -> memoryview:
        """Returns `size` bytes without values, of which number `start` lies at a multiple of 64 bytes.

        Raises:
            QueueFullError: No part of this size is free.
        """
        self.tidy()
        skipped = -start % ALIGNMENT
        needed = max(-(-(skipped + size) // ALIGNMENT) * ALIGNMENT, ALIGNMENT)
        offset = self._parts.take(needed)
        if offset is None:
            raise QueueFullError(f"no memory is free for a body of {size} bytes", hint="Try again later.")
        self._touched = max(self._touched, offset + needed)
        part = self._bytes[offset + skipped : offset + skipped + size]
        weakref.finalize(part, self._unused.append, (offset, needed)).atexit = False
        return part.data

    def offset_of(self, data: memoryview) -> int | None:
        """Returns where data lies in the memory; None if it does not."""
        if not data.nbytes:
            return 0
        offset = int(np.frombuffer(data, np.uint8).__array_interface__["data"][0]) - self._address
        return offset if 0 <= offset < self._bytes.size else None

    def tidy(self) -> None:
        """Frees what nothing refers to any more, and returns memory to the system that stays free."""
        while self._unused:
            self._parts.give_back(*self._unused.popleft())
        kept = -(-max(self._parts.used, _KEPT_BYTES) // _PAGE) * _PAGE
        if self._touched > 2 * kept:
            self._map.madvise(mmap.MADV_REMOVE, kept, -(-self._touched // _PAGE) * _PAGE - kept)
            self._touched = kept


class FreeParts:
    """Which parts of a range are free. The first that is large enough is taken."""

    def __init__(self, size: int) -> None:
        """All is free."""
        self._size = size
        self._starts = [0]  # of the free parts, in order
        self._sizes = {0: size}

    @property
    def used(self) -> int:
        """The end of the last part that is taken."""
        last = self._starts[-1] if self._starts else self._size
        return last if last + self._sizes.get(last, 0) == self._size else self._size

    def take(self, size: int) -> int | None:
        """Takes a part of at least one byte. Returns its start; None if none is large enough."""
        for place, start in enumerate(self._starts):
            free = self._sizes[start]
            if free < size:
                continue
            del self._sizes[start]
            if free == size:
                del self._starts[place]
            else:
                self._starts[place] = start + size
                self._sizes[start + size] = free - size
            return start
        return None

    def give_back(self, start: int, size: int) -> None:
        """Frees a part that was taken, and joins it with its neighbours."""
        place = bisect.bisect(self._starts, start)
        if place < len(self._starts) and self._starts[place] == start + size:
            size += self._sizes.pop(self._starts.pop(place))
        before = self._starts[place - 1] if place else None
        if before is not None and before + self._sizes[before] == start:
            self._sizes[before] += size
            return
        self._starts.insert(place, start)
        self._sizes[start] = size
