"""Writes docs/evidence/onnx-gallery.md from every module of tests/onnx/gallery: `python -m tools.onnx_gallery_page`.

Run it after a module, an expectation or a message changed. A test does the same, and fails when the page is stale.
"""

from __future__ import annotations

import os
import sys
import tempfile
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
ENTRIES = gallery.entries(ROOT / "tests" / "onnx" / "gallery", tuple(_TITLES))
VERSIONS = {name: version(name).partition("+")[0] for name in ("torch", "onnxscript", "onnxruntime")}

_HEAD = """\
# Modules that are hard to say in ONNX

Written by `make docs` from real runs, with {versions} on a CPU. Do not edit it.

Each module is a few lines in [tests/onnx/gallery](../../tests/onnx/gallery). It was exported with `--format onnx` and
the inputs and sizes that its class names. "verified" means that `exportkit verify` found ONNX Runtime's answers equal
to what eager answered, at both ends of the range and between. Otherwise the message is shown, the exit code is 5,
and no file is written. A named issue reports such a failure in PyTorch, ONNX Runtime or onnxscript.
"""


def page() -> str:
    """Exports and verifies every module and returns the page."""
    rows = {theme: [row(entry, _outcome(entry)) for entry in ENTRIES if entry.theme == theme] for theme in _TITLES}
    text = ", ".join(f"{name} {number}" for name, number in VERSIONS.items())
    sections = [gallery_page.section(title, rows[theme]) for theme, title in _TITLES.items()]
    return "\n".join([_HEAD.format(versions=text), *sections])


def row(entry: Entry, outcome: Outcome) -> str:
    """Returns a module's row of its table."""
    return gallery_page.row(entry, outcome, "verified")


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
