"""Python in a process of its own, for what must not happen in this one."""

from __future__ import annotations

import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from exportkit.child import process
from exportkit.child.channel import Channel
from exportkit.child.process import ChildProcess
from tests import fresh_command

ROOT = Path(__file__).parents[1]
_COMPILER = ("torch._inductor.compile_fx", "torch.export")
_PROGRAM = """#!{interpreter} -SEI
import sys
sys.path.insert(0, {tests!r})
import fresh_command
fresh_command.main({server!r}, {programs!r})
"""


def run_python(code: str, *args: object, cwd: Path, compiler: bool = False, **environment: str) -> str:
    """What the code printed; a failure, a crash included, fails the test with what was said.

    The process is forked from one that has imported torch and nothing else, which spares it two seconds. With
    `compiler` that has torch.export and Inductor, too, which spares two more. It starts outside of the source tree, and
    sees exportkit through PYTHONPATH only.
    """
    ran = _run(["-c", code, *map(str, args)], cwd, _environment(environment), _server(compiler))
    return _printed(ran.returncode, ran.stdout, ran.stderr)


def run_exportkit(*arguments: object, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """What a command of exportkit does in a process of its own, which has torch and Inductor at once."""
    command = ["-c", "import sys; from exportkit.cli import main; sys.exit(main())", *map(str, arguments)]
    return _run(command, cwd, _environment(environment), _server(compiler=True), quick_end=True)


def _run(
    command: list[str], cwd: Path, environment: Mapping[str, str], server: str, *, quick_end: bool = False
) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr, open(os.devnull) as stdin:
        files = (stdin.fileno(), stdout.fileno(), stderr.fileno())
        status = fresh_command.run(server, command, str(cwd), environment, files, quick_end=quick_end)
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
    with tempfile.TemporaryDirectory(prefix="fresh-") as folder:
        for name in names:
            program = Path(folder, name)
            program.write_text(
                _PROGRAM.format(
                    interpreter=sys.executable,
                    tests=str(ROOT / "tests"),
                    server=_server(compiler=True),
                    programs=str(Path(sys.executable).parent),
                )
            )
            program.chmod(0o755)
        yield Path(folder)


def _server(compiler: bool) -> str:
    """The address of a process that forks commands, and has imported torch in an environment like ours is now."""
    environment = tuple(sorted(item for item in os.environ.items() if not item[0].startswith(process.READ_LATER)))
    return _started(_COMPILER if compiler else (), environment, process._first_code).address


@dataclass(frozen=True)
class _Server:
    address: str
    child: ChildProcess
    folder: tempfile.TemporaryDirectory[str]


@functools.cache
def _started(
    modules: tuple[str, ...], environment: tuple[tuple[str, str], ...], first_code: Callable[..., str]
) -> _Server:
    """`first_code` is what its template runs first, which tests.templates changes for a while."""
    folder = tempfile.TemporaryDirectory(prefix="fresh-")
    address = f"{folder.name}/server"
    child = ChildProcess("tests.fresh_child")
    with socket.socket(socket.AF_UNIX) as listener, child.connection:
        listener.bind(address)
        listener.listen()
        setting = {"modules": modules, "path": _own_path()}
        Channel(child.connection).send(json.dumps(setting).encode(), [listener.fileno()])
    return _Server(address, child, folder)


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
    """Code that mounts a file system of this size for the process that runs it.

    Only root may, and not in every container: elsewhere the test is skipped.
    """
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
    ours, theirs = os.pipe()
    with open(ours) as printed, open(theirs, "w") as stdout:

        def kill(pid: int) -> None:
            stdout.close()
            assert printed.readline() == "now\n", "it ended before it came to the middle"
            os.kill(pid, signal.SIGKILL)

        with open(os.devnull) as stdin:
            files = (stdin.fileno(), stdout.fileno(), 2)
            command = ["-c", _PAUSE + code, *map(str, arguments)]
            if "LD_PRELOAD" in environment:  # it is read when a program starts
                command = ["-c", "import os, sys; os.execv(sys.executable, [sys.executable, *sys.argv[1:]])", *command]
            everything = _environment(environment)
            status = fresh_command.run(_server(True), command, os.getcwd(), everything, files, started=kill)
    assert status == -signal.SIGKILL
