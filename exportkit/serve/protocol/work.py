"""How much work may be done in the event loop's thread, where other requests wait meanwhile."""

LONG = 1 << 20
"""Bytes of JSON, or of a message's numbers, from which reading or writing them belongs into another thread."""

_COPIED = 8  # bytes that are copied while one is read as a number, at least


def work_of_copying(size: int) -> int:
    """Returns the work of copying bytes into or out of shared memory, in the unit of LONG."""
    return size // _COPIED
