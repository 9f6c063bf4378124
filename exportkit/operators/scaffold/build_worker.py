"""The child process of `exportkit.operators.scaffold.build_library`: runs a setup.py."""

from __future__ import annotations

import ctypes
import fcntl
import importlib
import os
import runpy
import select
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

from exportkit.child.messages import serve
from exportkit.errors import HostError
from exportkit.operators.scaffold.build_library import Build, Built

_PR_SET_PDEATHSIG = 1


def build(command: Build) -> Built:
    """Runs `setup.py build_ext --inplace`.

    Raises:
        HostError: setuptools is missing.
        RuntimeError: setup.py failed; what it printed is in the log.
    """
    log = os.open(command.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    fcntl.flock(log, fcntl.LOCK_EX)  # one build at a time; the kernel releases what a killed one held
    os.ftruncate(log, 0)
    for output in (1, 2):
        os.dup2(log, output)
    os.environ.setdefault("EXPORTKIT_CPP_RUNTIME", "0")  # of exportkit's own setup.py: no operator is in there
    if command.debug:
        os.environ["DEBUG"] = "1"
    return Built(tuple(_run_setup(Path(command.folder))))


def _run_setup(folder: Path) -> list[str]:
    try:
        setuptools = importlib.import_module("setuptools")
    except ImportError as error:
        raise HostError("setuptools is not installed", hint="pip install setuptools ninja") from error
    distributions: list[Any] = []
    setup = setuptools.setup

    def recorded(**arguments: Any) -> Any:
        distributions.append(setup(**arguments))
        return distributions[-1]

    vars(setuptools)["setup"] = recorded
    os.chdir(folder)
    sys.argv = ["setup.py", "build_ext", "--inplace"]
    sys.path.insert(0, str(folder))
    try:
        runpy.run_path("setup.py", run_name="__main__")
    except SystemExit as error:
        if error.code:
            raise RuntimeError(f"setup.py: {error.code}") from error
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    commands = [each.get_command_obj("build_ext") for each in distributions]
    return [str(folder / each.get_ext_fullpath(extension.name)) for each in commands for extension in each.extensions]


def main(connection: socket.socket) -> None:
    """Entry point of the child.

    When the parent ends, the compilers must too. The kernel would kill this process only, so that it watches the parent
    by itself, and asks its process group to end.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0)
    threading.Thread(target=_end_with, args=(connection.fileno(),), daemon=True).start()
    serve(connection, {Build: build})


def _end_with(connection: int) -> None:
    watched = select.poll()
    watched.register(connection, select.POLLRDHUP)
    watched.poll()
    os.killpg(os.getpgrp(), signal.SIGTERM)
