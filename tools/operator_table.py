"""Writes the table in docs/operators.md from the operators' SPECs: `python -m tools.operator_table`.

Run it after an operator, its schema, its layout or the first line of its docstring changed. A test fails when the table
is stale.
"""

from __future__ import annotations

import inspect
import re

from exportkit.arr_coc.ops import SPECS
from tools.generated import DOCS, with_section

DOCUMENT = DOCS / "operators.md"

_LONG_FLOAT = re.compile(r"\d\.\d{15,}e-\d+")  # torch prints 1e-5 with every digit of its double


def operator_table() -> str:
    """Returns a Markdown table of all operators except the gradients', which are listed below it."""
    lines = ["| operator | computes | gradients for |", "| --- | --- | --- |"]
    gradients = [name for name in SPECS if name.endswith("_grad")]
    for name, spec in SPECS.items():
        if name in gradients:
            continue
        schema = str(spec.overload._schema).removeprefix("arr_coc::")
        schema = _LONG_FLOAT.sub(lambda match: repr(float(match[0])), schema)
        summary = inspect.cleandoc(spec.wrapper.__doc__ or "").splitlines()[0].replace("|", r"\|")
        shapes = spec.layout.describe()
        lines.append(f"| **{name}**<br>`{schema}`<br>{shapes} | {summary} | {', '.join(spec.differentiable) or '-'} |")
    names = ", ".join(f"`{name}`" for name in gradients)
    lines += [
        "",
        f"The gradients are operators too; `exportkit ops list exportkit.arr_coc.ops` has their schemas: {names}.",
    ]
    return "\n".join(lines) + "\n"


def written(document: str) -> str:
    """Returns the document with the table of the current operators."""
    return with_section(document, "operators", operator_table())


if __name__ == "__main__":
    DOCUMENT.write_text(written(DOCUMENT.read_text()))
