"""The quick tests are the same on every machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.subprocesses import ROOT


@pytest.mark.parametrize("made_before", [False, True])
@pytest.mark.parametrize(
    ("option", "said"), [("--quick", "2 passed, 2 deselected, 1 error"), ("--verbose", "4 passed")]
)
def test_quick_tests_do_not_depend_on_what_was_made_before(
    option: str, said: str, made_before: bool, tmp_path: Path
) -> None:
    (tmp_path / "tests").mkdir()
    shutil.copy(ROOT / "tests" / "fixtures" / "quick_sample.py", tmp_path / "tests" / "test_sample.py")
    if made_before:
        (tmp_path / "made").touch()
    plain = ["-q", "-p", "tests.quick", "-p", "no:cacheprovider", "-o", "markers=process", "--rootdir", tmp_path]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MADE": str(tmp_path / "made")}
    command = [sys.executable, "-m", "pytest", *plain, option, tmp_path / "tests"]
    printed = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True).stdout
    assert said in printed
    assert ("test_without_a_marker" in printed and "mark it with @pytest.mark.process" in printed) is (
        option == "--quick"
    )
