"""JSON that has one reading: what two parsers could take for two things is refused before it is given a shape."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any


def parse(data: bytes, *, max_depth: int) -> Any:
    """The value, once it is known to be JSON in UTF-8 without repeated keys and without Python's own constants.

    Args:
        data: As it was read.
        max_depth: Of brackets, so that no parser recurses further than the format needs.

    Raises:
        ValueError: It is none; the message completes "the manifest ...".
    """
    _check_depth(data, max_depth)
    try:
        return json.loads(data.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
    except _NotStrict:
        raise
    except ValueError as error:  # of JSON, of UTF-8, or of an integer with thousands of digits
        raise ValueError(f"is not JSON in UTF-8: {error}") from error


class _NotStrict(ValueError):
    """JSON as Python has it, but not as we do."""


def _check_depth(data: bytes, max_depth: int) -> None:
    """Looks at the brackets outside of strings."""
    depth = 0
    # Not by a regular expression, which would make a list of millions of pieces out of as many escapes.
    unescaped = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    for token in re.finditer(rb'"[^"]*"?|[\[{]|[\]}]', unescaped):
        depth += {b"[": 1, b"{": 1, b"]": -1, b"}": -1}.get(token.group(), 0)
        if depth > max_depth:
            raise _NotStrict(f"is nested deeper than {max_depth} brackets")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        repeated = next(key for key, count in counts.items() if count > 1)
        raise _NotStrict(f"has the key {repeated!r} twice in one object")
    return found


def _no_constant(word: str) -> None:
    raise _NotStrict(f"holds {word}, which is not JSON")
