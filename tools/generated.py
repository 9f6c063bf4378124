"""Replaces the generated sections of a hand-written document.

A section stands between `<!-- NAME: written by make docs -->` and `<!-- /NAME -->`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
EVIDENCE = DOCS / "evidence"


def with_section(document: str, name: str, text: str) -> str:
    """Returns the document with `text` in the section `name`.

    Raises:
        ValueError: The document does not have exactly one such section.
    """
    begin, end = f"<!-- {name}: written by `make docs` -->\n", f"<!-- /{name} -->"
    pattern = re.compile(f"(?<={re.escape(begin)}).*?(?={re.escape(end)})", re.DOTALL)
    document, found = pattern.subn(lambda _: text, document)
    if found != 1:
        raise ValueError(f"expected one section {name!r}, found {found}")
    return document


def in_lines(value: Any, indent: str = "") -> str:
    """Returns JSON in which whatever fits into 400 characters is one line, such as a measurement."""
    text = msgspec.json.encode(value).decode()
    if len(text) <= 400 or not isinstance(value, dict | list | tuple):
        return text
    inner = f"{indent} "
    if isinstance(value, dict):
        items = [f"{msgspec.json.encode(key).decode()}: {in_lines(item, inner)}" for key, item in value.items()]
    else:
        items = [in_lines(item, inner) for item in value]
    begin, end = "{}" if isinstance(value, dict) else "[]"
    return f"{begin}\n{inner}" + f",\n{inner}".join(items) + f"\n{indent}{end}"
