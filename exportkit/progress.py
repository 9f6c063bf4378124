"""How long work says what it does."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str], None]
"""Called with each step before it starts."""


def silent(step: str) -> None:
    """Says nothing."""
