"""Writes the README's table of operators from the SPECs: `python -m exportkit.ops._table`. A test fails when stale."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from exportkit.ops import SPECS

README = Path(__file__).parents[2] / "README.md"
_BETWEEN = re.compile(r"(?<=<!-- operators: written by `make docs` -->\n).*?(?=<!-- /operators -->)", re.DOTALL)

_LONG_FLOAT = re.compile(r"\d\.\d{15,}e-\d+")  # torch prints 1e-5 with every digit of its double


def operator_table() -> str:
    """Markdown: every operator's schema, what it computes, and what it has gradients for; not the gradients' own."""
    lines = ["| operator | computes | gradients for |", "| --- | --- | --- |"]
    gradients = [name for name in SPECS if name.endswith("_grad")]
    for name, spec in SPECS.items():
        if name in gradients:
            continue
        schema = str(spec.overload._schema).removeprefix("arr_coc::").replace("|", r"\|")
        schema = _LONG_FLOAT.sub(lambda match: repr(float(match[0])), schema)
        summary = inspect.cleandoc(spec.wrapper.__doc__ or "").splitlines()[0]
        lines.append(f"| **{name}**<br>`{schema}` | {summary} | {', '.join(spec.differentiable) or '-'} |")
    lines += ["", "Gradients are operators too: " + ", ".join(f"`{name}`" for name in gradients) + "."]
    return "\n".join(lines) + "\n"


def with_table(readme: str) -> str:
    """The README with the table of today."""
    return _BETWEEN.sub(lambda _: operator_table(), readme)


if __name__ == "__main__":
    README.write_text(with_table(README.read_text()))
