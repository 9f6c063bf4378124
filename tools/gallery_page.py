"""Writes docs/evidence/gallery.md by exporting every module of tests/gallery: `python -m tools.gallery_page`.

Run it after a module, an expectation or a message changed. A test exports the modules too, and fails when the page is
stale.
"""

from __future__ import annotations

import os
import re
import string
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.gallery.entries import THEMES, Entry, Outcome, entries, export
from tools.generated import EVIDENCE, ROOT

DOCUMENT = EVIDENCE / "gallery.md"

_REPOSITORIES = {
    "pytorch": "pytorch/pytorch",
    "ao": "pytorch/ao",
    "executorch": "pytorch/executorch",
    "TICO": "Samsung/TICO",
    "kserve": "kserve/kserve",
    "norse": "norse/norse",
    "onnxruntime": "microsoft/onnxruntime",
    "onnxscript": "microsoft/onnxscript",
}
_TITLES = {
    "sizes": "Sizes",
    "values": "Control flow and sizes that depend on values",
    "fixed": "Control flow and sizes that depend on what is fixed",
    "flow": "Loops and branches of torch",
    "programs": "State, randomness, and code that is no operator",
    "structures": "Inputs, outputs and weights of unusual kinds",
    "operators": "Operators of a library",
}
_SIZES = "was declared to have:"
_LEFT_OUT = re.compile(
    " The model traces with it\\.| To let it vary, .* fix it\\.|, which is unknown when the model is compiled"
    "| when it is called again with the same inputs| in forward(?=:)"
    "|\\n *(?:traced at|eager raises) .*"
)
_ADVICE = "## Advice"
_SHORT = 5  # words of advice that is repeated
_HEAD = """\
# Modules that make trouble

Written by `make docs` from real runs, with torch {torch} on a CPU. Do not edit it.

Each module is a few lines in [tests/gallery](../../tests/gallery), exported with `--format program`. The programs of
modules in lists answer as eager does. The tables have the message of each module that is refused, without its
standing phrases, and the exit code if it is not 5. A letter stands for [advice](#advice) of several modules. A named
issue reports such a failure.
"""


def page() -> str:
    """Exports every module and returns the page."""
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        for entry in entries():
            outcomes.append((entry, export(entry, Path(folder) / "out.pt2")))
    sections = [_HEAD.format(torch=torch.__version__.partition("+")[0])]
    for theme in THEMES:
        rows = [row(entry, outcome) for entry, outcome in outcomes if entry.theme == theme]
        sections.append(section(_TITLES[theme], rows))
    return shortened("\n".join(sections))


def shortened(page: str) -> str:
    """Returns the page with a letter in the place of each long advice that several rows have, and these at its end."""
    ends = Counter(
        line.rpartition("<br>")[2] for line in page.splitlines() if line.startswith("| `") and "<br>" in line
    )
    often = [end.removesuffix(" |") for end, count in ends.items() if count > 1 and len(end.split()) > _SHORT]
    advice = dict(zip(string.ascii_uppercase, often))
    for letter, text in advice.items():
        page = page.replace(f"<br>{text} |\n", f" ({letter}) |\n")
    return page + "\n".join(["", _ADVICE, "", *(f"- {letter}: {text}" for letter, text in advice.items()), ""])


def unabridged(page: str) -> str:
    """Returns the page with the advice in each row that has it: the reverse of `shortened`."""
    page, _, advice = page.partition(f"\n{_ADVICE}\n")
    for letter, text in re.findall(r"^- (\w): (.+)$", advice, re.MULTILINE):
        page = page.replace(f" ({letter}) |\n", f"<br>{text} |\n")
    return page


def section(title: str, rows: Sequence[str]) -> str:
    """Returns a theme's heading, the list of what succeeded, and the table of what was refused."""
    succeeded = [each for each in rows if each.startswith("- ")]
    refused = [each for each in rows if each not in succeeded]
    head = ["| module | message |", "| --- | --- |"]
    parts = [succeeded, [*head, *refused] if refused else []]
    return "\n".join([f"## {title}", *(line for part in parts if part for line in ("", *part))]) + "\n"


def row(entry: Entry, outcome: Outcome) -> str:
    """Returns a module's line: of the list if it succeeded, else of the table."""
    what = entry.summary.split(" (")[0].rstrip(".")
    links = "".join(
        f", [{repository}#{number}](https://github.com/{_REPOSITORIES[repository]}/issues/{number})"
        for repository, number in entry.issues
    )
    since = f" (from torch {entry.since} on)" if entry.since else ""
    if not outcome.exit_code:
        return f"- `{entry.name}`{links}: {what}{since}"
    code = f"exit {outcome.exit_code}: " if outcome.exit_code != 5 else ""
    return f"| `{entry.name}`{links} | {code}{_cell(outcome.message)}{since} |"


def _cell(message: str) -> str:
    """Returns a message for a cell of a table, its lines kept apart."""
    escaped = _LEFT_OUT.sub("", message).replace("|", r"\|").replace("<", "&lt;").replace("*", r"\*")
    first, *lines = (line.strip() for line in escaped.splitlines())
    if not (lines and first.endswith(_SIZES)):
        lines = [first, *lines]
    return "<br>".join(lines)


if __name__ == "__main__":
    os.chdir(ROOT)
    DOCUMENT.write_text(page())
