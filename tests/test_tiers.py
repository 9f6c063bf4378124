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

THOROUGH = """
import pytest

@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_sizes(size):
    pass

@pytest.fixture
def costly():
    raise RuntimeError("made for a test that is skipped")

@pytest.mark.thorough
@pytest.mark.xfail(raises=RuntimeError, strict=True)
def test_costly(costly):
    pass
"""


@pytest.mark.parametrize(("options", "said"), [(["--quick"], "2 passed, 4 skipped"), ([], "6 passed")])
def test_what_starts_a_process_is_skipped_when_it_does(options: list[str], said: str, tmp_path: Path) -> None:
    assert said in run(TESTS, tmp_path, *options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "1 passed, 2 skipped"),
        (["--thorough"], "2 passed, 1 xfailed"),
        (["--thorough", "-m", "thorough"], "1 passed, 1 deselected, 1 xfailed"),
    ],
)
def test_what_is_thorough_is_skipped_unless_it_is_asked_for(options: list[str], said: str, tmp_path: Path) -> None:
    assert said in run(THOROUGH, tmp_path, *options)


def run(tests: str, folder: Path, *options: str) -> str:
    """What pytest says of these tests."""
    (folder / "test_sample.py").write_text(tests)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = thorough\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "tests.tiers", "-p", "no:cacheprovider", *options, str(folder)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr
