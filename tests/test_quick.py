"""The quick tests are the same on every machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fresh import ROOT

SAMPLE = ROOT / "tests" / "fixtures" / "quick_sample.py"


def run(folder: Path, *options: str) -> str:
    """What pytest says of the sample."""
    tests = folder / "tests"
    tests.mkdir()
    shutil.copy(SAMPLE, tests / "test_sample.py")
    plain = ["-q", "-p", "tests.quick", "-p", "no:cacheprovider", "-o", "markers=process", "--rootdir", folder]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "SAMPLE_FILE": str(folder / "made")}
    command = [sys.executable, "-m", "pytest", *plain, *options, tests]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False).stdout


@pytest.mark.parametrize("made_before", [False, True])
def test_quick_tests_do_not_depend_on_what_was_made_before(made_before: bool, tmp_path: Path) -> None:
    if made_before:
        (tmp_path / "made").touch()
    said = run(tmp_path, "--quick")
    assert "3 passed, 5 deselected, 1 error" in said
    assert "test_without_a_marker" in said
    assert "started a process (tests.one_maker in " in said
    assert "mark it with @pytest.mark.process" in said


def test_without_the_option_all_tests_run(tmp_path: Path) -> None:
    assert "8 passed" in run(tmp_path)
