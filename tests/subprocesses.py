"""Python in a process of its own, for what must not happen in this one."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from exportkit.child.channel import Channel
from exportkit.child.process import ChildProcess, Forkservers, use_forkservers

ROOT = Path(__file__).parents[1]
# pytest says in PYTEST_CURRENT_TEST where it is. Tests set the others; importing torch does not read them.
_READ_LATER = ("PYTEST_", "HOME", "XDG_", "SOFTPOOL_")
WITH_TORCH = Forkservers(read_later=_READ_LATER)
WITH_COMPILER = Forkservers("tests.compiler", read_later=_READ_LATER)
_PROGRAM = """#!{interpreter} -SEI
import sys
sys.path.insert(0, {root!r})
from tests import subprocess_command
subprocess_command.main({server!r}, {programs!r})
"""


@contextmanager
def compiler_in_forkservers() -> Iterator[None]:
    """Children of the code under test find what fake tensors and programs need: importing it takes each a second."""
    before = use_forkservers(WITH_COMPILER)
    yield
    use_forkservers(before)


class _Command:
    """A command of Python in a fork of a process that has imported torch.

    Args:
        command: -c and code, - for a program on stdin, or a script; and arguments.
        folder: Where it works.
        environment: All of its environment.
        files: Its stdin, stdout and stderr.
        forkservers: What it is forked from.
        quick_end: Spares 0.3 s at the end: exit functions are called, but the interpreter and torch are left as they
            are, so that what would crash there does not.
    """

    def __init__(
        self,
        command: Sequence[str],
        folder: str,
        environment: Mapping[str, str],
        files: Sequence[int],
        *,
        forkservers: Forkservers = WITH_COMPILER,
        quick_end: bool = False,
    ) -> None:
        child = ChildProcess("tests.subprocess_child", search_path="installed", forkservers=forkservers)
        self._channel = Channel(child.connection)
        self._channel.deadline = time.monotonic() + 3000
        request = {"command": command, "folder": folder, "environment": dict(environment), "quick_end": quick_end}
        self._channel.send(json.dumps(request).encode(), files)
        self.pid = int(self._channel.receive()[0])

    def wait(self) -> int:
        """How it ended, as subprocess says it."""
        try:
            return int(self._channel.receive()[0])
        except BaseException:
            os.kill(self.pid, signal.SIGKILL)
            raise
        finally:
            self._channel.close()


def run_python(code: str, *args: object, cwd: Path, compiler: bool = False, **environment: str) -> str:
    """What the code printed; a failure, a crash included, fails the test with what was said.

    The process is forked from one that has imported torch and nothing else, which spares it two seconds. With
    `compiler` that has torch.export and Inductor, too, which spares two more. It starts outside of the source tree, and
    sees exportkit through PYTHONPATH only.
    """
    forkservers = WITH_COMPILER if compiler else WITH_TORCH
    return _printed(_run(["-c", code, *map(str, args)], cwd, environment, forkservers=forkservers))


def run_exportkit(*arguments: object, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """What a command of exportkit does in a process of its own, which has torch and Inductor at once."""
    command = ["-c", "import sys; from exportkit.cli import main; sys.exit(main())", *map(str, arguments)]
    return _run(command, cwd, environment, quick_end=True)


def _run(
    command: list[str],
    cwd: Path,
    environment: Mapping[str, str],
    *,
    forkservers: Forkservers = WITH_COMPILER,
    quick_end: bool = False,
) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr, open(os.devnull) as stdin:
        files = (stdin.fileno(), stdout.fileno(), stderr.fileno())
        started = _Command(
            command, str(cwd), _environment(environment), files, forkservers=forkservers, quick_end=quick_end
        )
        status = started.wait()
        stdout.seek(0)
        stderr.seek(0)
        return subprocess.CompletedProcess(command, status, stdout.read(), stderr.read())


@contextmanager
def commands(*names: str) -> Iterator[Path]:
    """A folder for the beginning of PATH, with Python programs of the environment, which need not import torch.

    They are forks of a process that has imported torch, torch.export and Inductor, so they begin in a tenth of a
    second. All else is as if they were started: they have the caller's files, folder and environment, get its signals
    and return their exit codes.
    """
    with tempfile.TemporaryDirectory(prefix="fresh-") as folder, socket.socket(socket.AF_UNIX) as listener:
        server = f"{folder}/server"
        listener.bind(server)
        listener.listen()
        threading.Thread(target=_serve, args=(listener,), daemon=True).start()
        for name in names:
            program, programs = Path(folder, name), str(Path(sys.executable).parent)
            text = _PROGRAM.format(interpreter=sys.executable, root=str(ROOT), server=server, programs=programs)
            program.write_text(text)
            program.chmod(0o755)
        yield Path(folder)
        listener.shutdown(socket.SHUT_RDWR)


def _serve(listener: socket.socket) -> None:
    with suppress(OSError):  # it was shut down
        while True:
            threading.Thread(target=_serve_one, args=listener.accept()[:1], daemon=True).start()


def _serve_one(caller: socket.socket) -> None:
    channel = Channel(caller)
    body, files = channel.receive()
    started = _Command(**json.loads(body), files=files, quick_end=True)
    for file in files:
        os.close(file)
    channel.send(str(started.pid).encode())
    status = started.wait()
    with suppress(ConnectionError):  # the program was killed
        channel.send(str(status).encode())
    channel.close()


def run_interpreter(code: str, *args: object, cwd: Path, prefix: Sequence[str] = (), **environment: str) -> str:
    """The same in a new interpreter, for what happens before or while torch is imported, and for limits of memory.

    `prefix` is a command that runs the one that follows it.
    """
    command = [*prefix, sys.executable, "-c", code, *map(str, args)]
    return output_of(*command, cwd=cwd, env=_environment(environment), timeout=3000)


def output_of(*command: str | Path, **options: Any) -> str:
    """What a program printed on stdout; a failure fails the test with what was said."""
    return _printed(subprocess.run(command, capture_output=True, text=True, check=False, **options))


def _environment(additional: Mapping[str, str]) -> dict[str, str]:
    search = (str(ROOT), os.environ.get("PYTHONPATH"))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, search)), **additional}


def _printed(ran: subprocess.CompletedProcess[str]) -> str:
    assert ran.returncode == 0, f"exit status {ran.returncode}\n{ran.stdout}\n{ran.stderr}"
    return ran.stdout


_MOUNT = """
import ctypes, subprocess
assert ctypes.CDLL(None).unshare(0x20000) == 0  # CLONE_NEWNS; os.unshare comes with Python 3.12
for mount in (["--make-rprivate", "/"], ["-t", "tmpfs", "-o", "size={size},mode=700", "tmpfs", "{folder}"]):
    subprocess.run(["mount", *mount], check=True)
"""


def mounted(folder: Path, size: str) -> str:
    """Code that mounts a file system of this size for the process that runs it.

    Only root may, and not in every container: elsewhere the test is skipped.
    """
    tried = subprocess.run(["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", folder], capture_output=True)
    if tried.returncode:
        pytest.skip(f"no file system can be mounted here: {tried.stderr.decode()}")
    return _MOUNT.format(folder=folder, size=size)


# Says that it is in the middle of something, and waits to be killed.
_PAUSE = """
import sys, time
from pathlib import Path
from typing import Any
def pause():
    print("now", flush=True)
    time.sleep(600)
"""


def killed_in_the_middle(code: str, *arguments: object, **environment: str) -> None:
    """Runs the code, which has `sys` and `Path`, until it calls `pause()`, and kills it there with SIGKILL."""
    command = ["-c", _PAUSE + code, *map(str, arguments)]
    if "LD_PRELOAD" in environment:  # it is read when a program starts
        command = ["-c", "import os, sys; os.execv(sys.executable, [sys.executable, *sys.argv[1:]])", *command]
    ours, theirs = os.pipe()
    with open(ours) as printed, open(os.devnull) as stdin:
        started = _Command(command, os.getcwd(), _environment(environment), (stdin.fileno(), theirs, 2))
        os.close(theirs)
        assert printed.readline() == "now\n", "it ended before it came to the middle"
        os.kill(started.pid, signal.SIGKILL)
        assert started.wait() == -signal.SIGKILL
