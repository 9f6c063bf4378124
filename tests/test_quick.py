from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

TESTS = """
import os, subprocess, sys
import pytest
from exportkit.child.process import ChildProcess

def test_plain():
    pass  # it starts nothing

def test_popen():
    try:
        subprocess.run([sys.executable, "-c", ""])
    except Exception:
        pass  # a test that forgives a failed program is skipped all the same

def test_fork():
    if os.fork() == 0:
        os._exit(0)
    os.wait()

def test_child():
    ChildProcess("exportkit.child.probe").end()

@pytest.fixture(scope="session")
def compiled():
    subprocess.run([sys.executable, "-c", ""])

def test_fixture(compiled):
    pass  # it needs what a process made

def test_plain_again():
    pass  # it starts nothing, after others were skipped
"""


@pytest.mark.parametrize(("options", "passed", "skipped"), [(["--quick"], 2, 4), ([], 6, 0)])
def test_what_starts_a_process_is_skipped_when_it_does(
    options: list[str], passed: int, skipped: int, tmp_path: Path
) -> None:
    (tmp_path / "test_sample.py").write_text(TESTS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "tests.quick", "-p", "no:cacheprovider", *options, str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    said = f"{passed} passed" + (f", {skipped} skipped" if skipped else "")
    assert said in done.stdout, done.stdout + done.stderr
