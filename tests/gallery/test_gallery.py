"""Every troublesome module exports with a program that answers what eager does, or fails with the message expected."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch.torch_version import TorchVersion

from exportkit.export.artifact import export_aoti
from exportkit.export.export_options import TraceOptions
from exportkit.export.models.resolve import resolve
from exportkit.runtime.loader import load
from tests.gallery.entries import LINES, LONGEST, NOISE, ROOT, Entry, entries, export, one_of_each_theme_is_quick
from tools.gallery_page import row, unabridged

ENTRIES = entries()
PAGE = (ROOT / "docs" / "evidence" / "gallery.md").read_text()


@pytest.mark.parametrize("entry", one_of_each_theme_is_quick(ENTRIES))
def test_a_module_of_the_gallery_ends_as_it_says(
    entry: Entry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    outcome = export(entry, tmp_path / "out.pt2")
    if TorchVersion(torch.__version__) < (entry.since or "0"):
        assert (outcome.exit_code, bool(outcome.message)) == (5, True)
        return
    assert outcome.exit_code == entry.exit_code, outcome.message
    assert entry.says in outcome.message
    assert bool(outcome.message) == bool(entry.exit_code)
    assert (tmp_path / "out.pt2").exists() == (not entry.exit_code)
    written = outcome.stderr + capfd.readouterr().err
    # Where torch is built for CUDA and there is no driver, torch says where to find one.
    assert "http" not in outcome.message + written or "NVIDIA driver" in outcome.message
    assert NOISE.search(outcome.message + written) is None
    assert len(outcome.message) < LONGEST
    if f"with torch {torch.__version__.partition('+')[0]} " in PAGE:
        assert row(entry, outcome) in unabridged(PAGE), (
            "docs/evidence/gallery.md is stale: run `python -m tools.gallery_page`"
        )


def test_the_gallery_has_what_it_promises() -> None:
    assert len({(entry.theme, entry.name) for entry in ENTRIES}) == len(ENTRIES) >= 40
    assert all(entry.summary for entry in ENTRIES)
    assert all((entry.exit_code in (2, 5)) == bool(entry.says) for entry in ENTRIES)


def test_the_page_has_a_row_for_each_module_and_no_other() -> None:
    assert sorted(LINES.findall(PAGE)) == sorted(entry.name for entry in ENTRIES)


@pytest.mark.slow
def test_masked_scatter_is_right_when_it_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # pytorch#186146: wrong values, and no error.
    monkeypatch.chdir(ROOT)
    entry = next(entry for entry in ENTRIES if entry.name == "MaskedScatter")
    words = entry.arguments
    inputs, dynamic = (
        [text for word, text in itertools.pairwise(words) if word == option] for option in ("--input", "--dynamic")
    )
    export_aoti(
        resolve(words[0], inputs=inputs), tmp_path / "out.pt2", TraceOptions(dynamic=dynamic, cases=3, edge_cases=False)
    )
    with load(tmp_path / "out.pt2", device="cpu") as model:
        assert len(model.cases) == 3
        for case in model.cases:
            assert model(*case.args, **case.kwargs).equal(case.outputs)
