"""Modules that are hard to say in ONNX answer there what eager answers, or are refused with the message expected."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.torch_version import TorchVersion

from exportkit.verify.options import VerifyOptions
from exportkit.verify.verify import verify
from tests.gallery.entries import LONGEST, NOISE, ROOT, Entry, entries, export, one_of_each_theme_is_quick

CASES = VerifyOptions(against="cases")  # which export recorded at the ends of the range and between them
ENTRIES = [
    *entries(ROOT / "tests" / "onnx" / "gallery", ("modules",)),
    *(
        replace(entry, theme="shared", exit_code=5 if entry.onnx else 0, says=entry.onnx)
        for entry in entries()
        if entry.onnx is not None
    ),
]


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
        assert len(report.checks) >= 4 if varies else len(report.checks) == 1  # more on both sides of a condition
