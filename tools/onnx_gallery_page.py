"""Writes docs/evidence/onnx-gallery.md from every module of tests/onnx/gallery: `python -m tools.onnx_gallery_page`.

Run it after a module, an expectation or a message changed. A test does the same, and fails when the page is stale.
"""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from exportkit.verify.options import VerifyOptions
from exportkit.verify.verify import verify
from tests.gallery import entries as gallery
from tests.gallery.entries import Entry, Outcome
from tools import gallery_page
from tools.generated import EVIDENCE, ROOT

PAGE = EVIDENCE / "onnx-gallery.md"
CASES = VerifyOptions(against="cases")  # which export recorded at the ends of the range and between them

_TITLES = {
    "indexing": "Positions and masks",
    "arithmetic": "Numbers",
    "ordering": "Order",
    "layers": "Layers",
}
_SHARED = "shared"
ENTRIES = [
    *gallery.entries(ROOT / "tests" / "onnx" / "gallery", tuple(_TITLES)),
    *(
        replace(entry, theme=_SHARED, exit_code=5 if entry.onnx else 0, says=entry.onnx)
        for entry in gallery.entries()
        if entry.onnx is not None
    ),
]
_TITLES[_SHARED] = "Modules of [the other gallery](gallery.md)"
VERSIONS = {name: version(name).partition("+")[0] for name in ("torch", "onnxscript", "onnxruntime")}

_HEAD = """\
# Modules that are hard to say in ONNX

Written by `make docs` from real runs, with {versions} on a CPU. Do not edit it.

Each module is a few lines in [tests/onnx/gallery](../../tests/onnx/gallery), exported with `--format onnx`. For those
in lists, ONNX Runtime's answers agree with eager's at both ends of the range and between. The tables have the message
of each module that is refused, with exit code 5. A letter stands for [advice](#advice) of several modules. A named
issue reports such a failure.
"""


def page() -> str:
    """Exports and verifies every module and returns the page."""
    rows: dict[str, list[str]] = {theme: [] for theme in _TITLES}
    for entry in ENTRIES:
        rows[entry.theme].append(row(entry, _outcome(entry)))
    text = ", ".join(f"{name} {number}" for name, number in VERSIONS.items())
    sections = [gallery_page.section(title, rows[theme]) for theme, title in _TITLES.items()]
    return gallery_page.shortened("\n".join([_HEAD.format(versions=text), *sections]))


def row(entry: Entry, outcome: Outcome) -> str:
    """Returns a module's line. What the other gallery says of a module is not repeated."""
    line = gallery_page.row(entry, outcome)
    if entry.theme != _SHARED:
        return line
    if not outcome.exit_code:
        return f"- `{entry.name}`"
    there = line in gallery_page.unabridged(gallery_page.DOCUMENT.read_text()).splitlines()
    return f"| `{entry.name}` | {'as there |' if there else line.partition(' | ')[2]}"


def _outcome(entry: Entry) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "out.onnx"
        outcome = gallery.export(entry, path, "onnx")
        if not outcome.exit_code and (report := verify(path, CASES)).exit_code:
            sys.exit(f"{entry.name} differs: {report.failure}")
    return outcome


if __name__ == "__main__":
    os.chdir(ROOT)
    PAGE.write_text(page())
