"""A process that has torch ends without taking it apart, but does what must be done at the end."""

from __future__ import annotations

import subprocess
import sys

from tests.artifacts import ROOT

_SCRIPT = """
import atexit, sys, threading, time
from exportkit.child.process_end import end_at_once

class Taken:
    def __del__(self):
        print("taken apart")

{before}
atexit.register(print, "registered")
kept = Taken()
print("printed")
sys.exit(end_at_once(3))
"""


def run(before: str) -> tuple[int, list[str]]:
    """Runs the script, and returns its exit code and what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT.format(before=before)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert not done.stderr
    return done.returncode, done.stdout.split("\n")[:-1]


def test_a_process_that_has_torch_ends_at_once() -> None:
    assert run("sys.modules['torch'] = sys") == (3, ["printed", "registered"])


def test_a_process_without_torch_ends_as_python_does() -> None:
    assert run("") == (3, ["printed", "registered", "taken apart"])


def test_a_thread_is_waited_for() -> None:
    thread = "threading.Thread(target=lambda: (time.sleep(0.5), print('worked'))).start()"
    code, printed = run(f"sys.modules['torch'] = sys; {thread}")
    assert (code, sorted(printed)) == (3, ["printed", "registered", "taken apart", "worked"])
