"""Text of an artifact on its way to a page: it is bounded, and nothing in it can end or steer the page."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")

LONGEST = 1000  # characters of one text


def plain_text(text: str, longest: int = LONGEST) -> str:
    """Escapes what is not visible, such as characters that reverse the text after them, and shortens long text."""
    if len(text) > longest:
        text = f"{text[:longest]}... ({len(text)} characters)"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


@dataclass(frozen=True)
class PageLimits:
    """How much of each thing a page has room for."""

    rows: int = 1000  # of a table
    weights: int = 200
    cases: int = 64  # in the histograms
    case_bytes: int = 128 << 20  # that are read for them
    calls: int = 500  # of operators by compiled code
    checks: int = 500


class LeftOut:
    """What a page has no room for.

    Attributes:
        limits: How much it has room for.
        notes: What it does not show, and why.
    """

    def __init__(self, limits: PageLimits = PageLimits()) -> None:
        self.limits = limits
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        """Notes what is not shown."""
        self.notes.append(text)

    def first(self, items: Sequence[T], limit: int, what: str) -> Sequence[T]:
        """Returns at most `limit` items. What is left out is noted."""
        if len(items) > limit:
            self.note(f"{len(items) - limit:,} of {len(items):,} {what}")
        return items[:limit]


def page_value(value: Any) -> Any:
    """Returns a value with each text in it made plain, and NaN and infinities as text, which JSON lacks."""
    if isinstance(value, str):
        return plain_text(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {plain_text(str(key)): page_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [page_value(item) for item in value]
    return value


def script_json(document: Any) -> str:
    """Returns JSON that may stand in a script element: ASCII, without the characters that HTML gives a meaning to."""
    text = json.dumps(page_value(document), allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
