"""Which versions of Python and torch exportkit works with: the one table of it.

Messages read it. `tests/policy/test_metadata.py` holds pyproject.toml, the documents, the Makefile and the workflows
against it.
"""

from __future__ import annotations

PYTHONS = ("3.11", "3.12", "3.13")
"""Where the whole suite runs. The first one is the oldest that exportkit works with; newer ones are not refused."""

OLDEST_TORCH = "2.11"
"""The oldest torch that loads packages and operator libraries: they use its stable ABI and nothing newer."""

EXPORTING_TORCHES = ("2.11", "2.12", "2.13", "2.14", "2.15")
"""The versions of torch that export: it replaces private functions of torch, which other versions may not have."""

_UP_TO_2_12 = "no export of vmap over a size that varies; no program file with a scan, or with a branch under vmap"
LACKS = {
    "2.11": f"{_UP_TO_2_12}; no compiled code that passes a dtype, a layout or a memory format to an operator",
    "2.12": _UP_TO_2_12,
}
"""What some of them lack. Modules of tests/gallery that name a later version as the first one show it."""

PINNED_TORCH = "2.13"
"""What constraints.txt installs: the suite runs with it."""

NEWEST_TORCH = EXPORTING_TORCHES[-1]
"""What continuous integration runs the whole suite with, too."""

OTHER_TORCHES = ("2.11", "2.15")
"""The versions of torch that load packages of the pinned one in continuous integration, and the reverse."""


def exporting_torches() -> str:
    """Returns the versions of torch that export, such as "2.11, 2.12 or 2.13"."""
    *first, last = EXPORTING_TORCHES
    return f"{', '.join(first)} or {last}"
