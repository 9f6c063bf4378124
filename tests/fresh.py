"""Python in a process of its own, for what must not happen in this one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_python(code: str, *args: object, cwd: Path, prefix: Sequence[str] = (), **environment: str) -> str:
    """What the code printed; a failure, a crash included, fails the test with what was said.

    The process starts outside of the source tree, and sees exportkit through PYTHONPATH only. `prefix` is a command
    that runs the one that follows it.
    """
    search = (str(ROOT), os.environ.get("PYTHONPATH"))
    result = subprocess.run(
        [*prefix, sys.executable, "-c", code, *map(str, args)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, search)), **environment},
        capture_output=True,
        text=True,
        timeout=3000,
        check=False,
    )
    assert result.returncode == 0, f"exit status {result.returncode}\n{result.stdout}\n{result.stderr}"
    return result.stdout


# Says that it is in the middle of something, and waits to be killed.
_PAUSE = """
import sys, time
from pathlib import Path
def pause():
    print("now", flush=True)
    time.sleep(600)
"""


def killed_in_the_middle(code: str, *arguments: object, **environment: str) -> None:
    """Runs the code, which has `sys` and `Path`, until it calls `pause()`, and kills it there with SIGKILL."""
    search = (str(ROOT), os.environ.get("PYTHONPATH"))
    with subprocess.Popen(
        [sys.executable, "-c", _PAUSE + code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, search)), **environment},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "now\n", "it ended before it came to the middle"
        process.kill()
        assert process.wait() == -signal.SIGKILL
