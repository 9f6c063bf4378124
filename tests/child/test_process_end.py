"""A process that has torch ends without taking it apart, but does what must be done at the end."""

from __future__ import annotations

import subprocess
import sys

import pytest

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


TORCH = "sys.modules['torch'] = sys"
THREAD = "threading.Thread(target=lambda: (time.sleep(0.5), print('worked'))).start()"
WHOLE = ["printed", "registered", "taken apart"]


@pytest.mark.parametrize(
    ("before", "printed"),
    [(TORCH, ["printed", "registered"]), ("", WHOLE), (f"{TORCH}; {THREAD}", [*WHOLE, "worked"])],
    ids=["torch ends at once", "without torch as Python does", "a thread is waited for"],
)
def test_a_process_ends(before: str, printed: list[str]) -> None:
    command = [sys.executable, "-c", _SCRIPT.format(before=before)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert not done.stderr
    assert (done.returncode, sorted(done.stdout.split("\n")[:-1])) == (3, printed)
