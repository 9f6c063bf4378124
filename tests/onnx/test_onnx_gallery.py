"""Every troublesome module becomes ONNX that answers what eager answers, or is refused with the message expected."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.torch_version import TorchVersion

from exportkit.verify.verify import verify
from tests.gallery.entries import LINES, LONGEST, NOISE, ROOT, Entry, export, one_of_each_theme_is_quick
from tools.gallery_page import unabridged
from tools.onnx_gallery_page import CASES, ENTRIES, PAGE, VERSIONS, row

DOCUMENT = PAGE.read_text()


@pytest.mark.parametrize("entry", one_of_each_theme_is_quick(ENTRIES))
def test_a_module_is_verified_or_refused_as_it_says(
    entry: Entry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    path = tmp_path / "out.onnx"
    outcome = export(entry, path, "onnx")
    if TorchVersion(torch.__version__) < (entry.since or "0"):
        assert outcome.exit_code
        return
    assert outcome.exit_code == entry.exit_code, outcome.message
    assert entry.says in outcome.message
    assert path.exists() == (not entry.exit_code)
    assert NOISE.search(outcome.message + outcome.stderr) is None
    assert len(outcome.message) < LONGEST
    if not entry.exit_code:
        report = verify(path, CASES)
        assert report.exit_code == 0, report.failure
        varies = "--dynamic" in entry.arguments or entry.arguments[0].endswith(".make")
        assert len(report.checks) == (4 if varies else 1)
    if all(f"{package} {version}" in DOCUMENT for package, version in VERSIONS.items()):
        assert row(entry, outcome) in unabridged(DOCUMENT), (
            "docs/evidence/onnx-gallery.md is stale: run `python -m tools.onnx_gallery_page`"
        )


def test_the_gallery_has_what_it_promises() -> None:
    assert len({entry.name for entry in ENTRIES}) == len(ENTRIES) >= 30
    assert all(entry.summary for entry in ENTRIES)
    assert all((entry.exit_code == 5) == bool(entry.says) for entry in ENTRIES)
    assert len({issue for entry in ENTRIES for issue in entry.issues}) >= 12


def test_the_page_has_a_row_for_each_module_and_no_other() -> None:
    assert sorted(LINES.findall(DOCUMENT)) == sorted(entry.name for entry in ENTRIES)
