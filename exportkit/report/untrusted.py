"""Text of an artifact on its way to a page: it is bounded, and nothing in it can end or steer the page."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
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


def first(items: Sequence[T], limit: int, what: str, left_out: list[str]) -> Sequence[T]:
    """Returns at most `limit` items. What is left out is noted."""
    if len(items) <= limit:
        return items
    left_out.append(f"{len(items) - limit:,} of {len(items):,} {what}")
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
