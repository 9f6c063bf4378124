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
    "flow": "Loops and branches of torch",
    "programs": "State, randomness, and code that is no operator",
    "structures": "Inputs, outputs and weights of unusual kinds",
    "operators": "Operators of a library",
}
_SIZES = "was declared to have:"
_LEFT_OUT = re.compile(
    " The model traces with it\\.|, which is unknown when the model is compiled"
    "| when it is called again with the same inputs| in forward(?=:)"
)
_ADVICE = "## Advice"
_SHORT = 14  # words of advice that is repeated
_HEAD = """\
# Modules that make trouble

Written by `make docs` from real runs, with torch {torch} on a CPU. Do not edit it.

Each module is a few lines in [tests/gallery](../../tests/gallery), exported with `--format program`, which traces it,
checks its operators, records cases, and runs the traced program on them. `exportkit export` was given the inputs and
sizes that the class names. "exports" means that the program answered what eager answered. Otherwise the message is
shown, with the exit code if it is not 5. A named issue reports such a failure.

Left out are "the model does not take every size that `batch` (x:0) was declared to have", "The model traces with it",
"which is unknown when the model is compiled", "when it is called again with the same inputs". A letter stands for
advice of several modules.
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
    """Returns a theme's heading and table."""
    head = ["| module | what it does | outcome |", "| --- | --- | --- |"]
    return "\n".join([f"## {title}", "", *head, *rows]) + "\n"


def row(entry: Entry, outcome: Outcome, succeeded: str = "exports") -> str:
    """Returns a module's row of its table; `succeeded` is what it says if the exit code is 0."""
    what = entry.summary.split(" (")[0].rstrip(".")
    links = [
        f"[{name}#{number}](https://github.com/{_REPOSITORIES[name]}/issues/{number})" for name, number in entry.issues
    ]
    code = f"exit {outcome.exit_code}: " if outcome.exit_code != 5 else ""
    ended = code + _cell(outcome.message) if outcome.exit_code else succeeded
    ended += f" (seen from torch {entry.since} on; older versions refuse it)" if entry.since else ""
    return f"| `{entry.name}` | {what}{'; ' + ', '.join(links) if links else ''} | {ended} |"


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
