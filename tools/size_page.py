"""docs/models.md, from the results of `python -m tools.sizes_table`."""

from __future__ import annotations

from typing import Any

from tools.size_catalogue import SIZED

Results = dict[str, Any]


def page(document: Results) -> str:
    """Returns the page."""
    return "\n".join(str(r) for r in document["models"].items() if SIZED) + "\n"
