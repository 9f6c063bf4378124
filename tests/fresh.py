"""Python in a process of its own, for what must not happen in this one."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from exportkit.child.process import ChildProcess

ROOT = Path(__file__).parents[1]


def run_python(code: str, *args: object, cwd: Path, **environment: str) -> str:
    """What the code printed; a failure, a crash included, fails the test with what was said.

    The process is forked from one that has imported torch and nothing else, which spares it two seconds. It starts
    outside of the source tree, and sees exportkit through PYTHONPATH only.
    """
    with tempfile.TemporaryDirectory(prefix="fresh-") as folder:
        stdout, stderr = Path(folder, "stdout"), Path(folder, "stderr")
        stdout.touch()
        stderr.touch()
        everything = _environment(environment)
        request = {
            "code": code,
            "arguments": list(map(str, args)),
            "cwd": str(cwd),
            "environment": everything,
            "path": ["", *everything["PYTHONPATH"].split(os.pathsep), *_own_path()],
            "stdout": str(stdout),
            "stderr": str(stderr),
        }
        child = ChildProcess("tests.fresh_child")
        try:
            with child.connection:
                child.connection.sendall(json.dumps(request).encode())
            status = child.wait(3000)
        finally:
            child.end()
        return _printed(status, stdout.read_text(), stderr.read_text())


def run_interpreter(code: str, *args: object, cwd: Path, prefix: Sequence[str] = (), **environment: str) -> str:
    """The same in a new interpreter, for what happens before or while torch is imported, and for limits of memory.

    `prefix` is a command that runs the one that follows it.
    """
    result = subprocess.run(
        [*prefix, sys.executable, "-c", code, *map(str, args)],
        cwd=cwd,
        env=_environment(environment),
        capture_output=True,
        text=True,
        timeout=3000,
        check=False,
    )
    return _printed(result.returncode, result.stdout, result.stderr)


def _environment(additional: Mapping[str, str]) -> dict[str, str]:
    search = (str(ROOT), os.environ.get("PYTHONPATH"))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, search)), **additional}


def _printed(status: int | None, stdout: str, stderr: str) -> str:
    assert status == 0, f"exit status {status}\n{stdout}\n{stderr}"
    return stdout


_MOUNT = """
import ctypes, subprocess
assert ctypes.CDLL(None).unshare(0x20000) == 0  # CLONE_NEWNS; os.unshare comes with Python 3.12
for mount in (["--make-rprivate", "/"], ["-t", "tmpfs", "-o", "size={size},mode=700", "tmpfs", "{folder}"]):
    subprocess.run(["mount", *mount], check=True)
"""


def mounted(folder: Path, size: str) -> str:
    """Code that mounts a file system of this size for the process that runs it. Where that is forbidden, a skip."""
    tried = subprocess.run(["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", folder], capture_output=True)
    if tried.returncode:
        pytest.skip(f"no file system can be mounted here: {tried.stderr.decode()}")
    return _MOUNT.format(folder=folder, size=size)


@functools.cache
def _own_path() -> list[str]:
    """Where the interpreter looks for modules by itself."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", "import json, sys; print(json.dumps(sys.path[1:]))"]
    ran = subprocess.run(command, env=environment, capture_output=True, check=True)
    found: list[str] = json.loads(ran.stdout)
    return found


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
    with subprocess.Popen(
        [sys.executable, "-c", _PAUSE + code, *map(str, arguments)],
        env=_environment(environment),
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "now\n", "it ended before it came to the middle"
        process.kill()
        assert process.wait() == -signal.SIGKILL
