"""The other side of tests/fresh.py: a process that has imported modules, and forks for every command.

It forks twice. The first child becomes the template (exportkit.child) of the second, which runs the command: children
of a command need not import torch either.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
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
from exportkit.child.template import end_with, serve


def main(connection: socket.socket) -> None:
    body, (file,) = Channel(connection).receive()
    setting = json.loads(body)
    # Inductor asks whether there is a GPU. With this, torch asks NVML and not CUDA, which would not work in forks then.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    for module in setting["modules"]:
        importlib.import_module(module)
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that it forks
    server = os.getpid()
    with socket.socket(fileno=file) as listener:
        while True:
            caller, _ = listener.accept()
            if os.fork() == 0:
                break
            caller.close()
    _serve_one(caller, server, setting["path"])


def _serve_one(caller: socket.socket, server: int, path: list[str]) -> None:
    """Starts the command, is its template, and says how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    channel = Channel(caller)
    body, files = channel.receive()
    command, template = socket.socketpair()
    keeper = os.getpid()
    pid = os.fork()
    if pid == 0:
        end_with(keeper)
        os.setsid()
        for each in (caller, template):
            each.close()
        _run(json.loads(body), files, path, command)
        return
    for file in files:
        os.close(file)
    command.close()
    channel.send(str(pid).encode())
    serve(template.detach(), server, None)  # until the command ends
    if os.getpid() == keeper:
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(ConnectionError):  # nobody waits any more
            channel.send(str(os.waitstatus_to_exitcode(status)).encode())
        os._exit(0)  # not taking torch apart spares 0.3 s


def _run(request: dict[str, Any], files: list[int], path: list[str], connection: socket.socket) -> None:
    """Becomes the command."""
    for file, standard in zip(files, (0, 1, 2)):
        os.dup2(file, standard)
        os.close(file)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    tempfile.tempdir = None  # from the environment again
    what, *arguments = request["command"]
    if what == "-c":
        first, code = "", arguments.pop(0)
    else:
        first, code = ("", sys.stdin.read()) if what == "-" else _script(what)
    path_variable = os.environ.get("PYTHONPATH", "")
    sys.path[:] = [first, *filter(None, path_variable.split(os.pathsep)), *path]
    sys.argv[:] = [what, *arguments]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("exportkit", "tests")]:
        del sys.modules[name]
    _use_template(connection)
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    if what not in ("-c", "-"):
        module.__file__ = what
    try:
        exec(compile(code, {"-c": "<string>", "-": "<stdin>"}.get(what, what), "exec"), vars(module))
    except SystemExit as end:
        if request["quick_end"] and isinstance(end.code, int):
            _end(end.code)
        raise
    except Exception:  # what the code raises ends an interpreter in this way
        traceback.print_exc()
        sys.exit(1)
    if request["quick_end"]:
        _end(0)


def _end(status: int) -> None:
    """Ends this process as an interpreter does, but for taking torch apart, which takes 0.3 s."""
    # The interpreter calls these two when it ends. Neither is public.
    threading._shutdown()  # type: ignore[attr-defined]  # typeshed does not list it
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _script(path: str) -> tuple[str, bytes]:
    with open(path, "rb") as file:
        return os.path.dirname(os.path.realpath(path)), file.read()


def _use_template(connection: socket.socket) -> None:
    """Lets the first template of this process be the one that is there already."""
    from exportkit.child import process

    os.register_at_fork(after_in_child=connection.close)  # the template ends when nobody has it
    there, start = [process._Conditions.now(with_torch=True)], process.start_template

    def start_template(conditions: Any) -> Any:
        if there and conditions == there[0]:
            there.clear()
            return connection, lambda: -signal.SIGKILL
        return start(conditions)

    process.start_template = start_template
