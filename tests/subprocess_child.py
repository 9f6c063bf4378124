"""The other side of tests/subprocesses.py: a child process that becomes a command of Python.

It forks once more: the fork is the command, and this process the forkserver (exportkit.child) of the command's
children, which need not import torch either.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import traceback
import types
from typing import Any

from exportkit.child.channel import Channel
from exportkit.child.forkserver import serve
from exportkit.child.process_end import end_with


def main(connection: socket.socket) -> None:
    """Starts the command, is its forkserver, and says how it ended."""
    channel = Channel(connection)
    body, files = channel.receive()
    command, forkserver = socket.socketpair()
    keeper = os.getpid()
    pid = os.fork()
    if pid == 0:
        end_with(keeper)
        os.setsid()
        for each in (connection, forkserver):
            each.close()
        _run(json.loads(body), files, command)
        return
    for file in files:
        os.close(file)
    command.close()
    channel.send(str(pid).encode())
    serve(forkserver.detach(), os.getppid(), None)  # until the command ends
    if os.getpid() == keeper:
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(ConnectionError):  # nobody waits any more
            channel.send(str(os.waitstatus_to_exitcode(status)).encode())
        os._exit(0)  # not taking torch apart spares 0.3 s


def _run(request: dict[str, Any], files: list[int], connection: socket.socket) -> None:
    """Becomes the command."""
    for file, standard in zip(files, (0, 1, 2)):
        os.dup2(file, standard)
        os.close(file)
    # What the interpreter finds by itself: without the folder of exportkit, which is the last, and PYTHONPATH.
    path = [folder for folder in sys.path[:-1] if folder not in os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    tempfile.tempdir = None  # from the environment again
    what, *arguments = request["command"]
    first, file_name = "", {"-c": "<string>", "-": "<stdin>"}.get(what, what)
    module = types.ModuleType("__main__")
    if what == "-c":
        code = arguments.pop(0)
    elif what == "-":
        code = sys.stdin.read()
    else:
        first, module.__file__ = os.path.dirname(os.path.realpath(what)), what
        with open(what) as script:
            code = script.read()
    sys.path[:] = [first, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *path]
    sys.argv[:] = [what, *arguments]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("exportkit", "tests")]:
        del sys.modules[name]
    sys.modules["__main__"] = module
    _use_forkserver(connection)
    try:
        exec(compile(code, file_name, "exec"), vars(module))
        status = 0
    except SystemExit as end:
        if not isinstance(end.code, int) or not request["quick_end"]:
            raise
        status = end.code
    except Exception:  # what the code raises ends an interpreter in this way
        traceback.print_exc()
        sys.exit(1)
    if request["quick_end"]:  # as an interpreter ends, but for taking torch apart, which takes 0.3 s
        threading._shutdown()  # type: ignore[attr-defined]  # the interpreter calls these two; neither is public
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _use_forkserver(connection: socket.socket) -> None:
    """Lets the first forkserver of this process be the one that is there already."""
    from exportkit.child import process

    def start(conditions: process.Conditions) -> process.Started:
        if there and conditions == there[0]:
            there.clear()
            return connection, lambda: -signal.SIGKILL
        return process.start_forkserver(conditions)

    forkservers = process.Forkservers(start=start)
    there = [forkservers.conditions(with_torch=True)]
    os.register_at_fork(after_in_child=connection.close)  # the forkserver ends when nobody has it
    process.use_forkservers(forkservers)
