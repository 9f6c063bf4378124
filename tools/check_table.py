"""Writes the table of checks in docs/operator-check.md: `python -m tools.check_table`.

Run it after a check, its name or the first line of its docstring changed. A test fails when the table is stale.
"""

from __future__ import annotations

import inspect

from exportkit.operators.contract.definition import checks
from tools.generated import DOCS, with_section

DOCUMENT = DOCS / "operator-check.md"


def check_table() -> str:
    """Returns a Markdown table of the checks, in the order in which they run."""
    lines = ["| check | promise |", "| --- | --- |"]
    for check in checks().values():
        promise = inspect.cleandoc(check.function.__doc__ or "").splitlines()[0]
        lines.append(f"| `{check.name}` | {promise.replace('|', chr(92) + '|')} |")
    return "\n".join(lines) + "\n"


def written(document: str) -> str:
    """Returns the document with the table of the current checks."""
    return with_section(document, "checks", check_table())


if __name__ == "__main__":
    DOCUMENT.write_text(written(DOCUMENT.read_text()))
