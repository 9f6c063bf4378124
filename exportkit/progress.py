"""How work says what it does."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str], None]
"""Called with each step before it starts."""

_note: Callable[[str, str], None] | None = None


def silent(step: str) -> None:
    """Says nothing."""


def note_with(function: Callable[[str, str], None]) -> None:
    """From now on the process notes a step, or "" and a node of the graph within it, for whoever finds it dead."""
    global _note
    _note = function


def notes() -> bool:
    """Returns whether somebody wants to know what this process is doing."""
    return _note is not None


def note(step: str, node: str = "") -> None:
    """Notes a step, or a node within the step if that is ""."""
    if _note is not None:
        _note(step, node)


def bytes_text(count: int) -> str:
    """Returns such as `1.4 MB`, in decimal units."""
    if count > 2**63:  # a manifest may declare such sizes; the largest do not fit a float
        return "more than 2^63 bytes"
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} bytes"
