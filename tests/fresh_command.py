"""Runs a command of Python in a fork of a process that has imported what takes long: see tests/fresh.py.

It is also what the programs of `fresh.commands` run, so it imports little.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import sys
from collections.abc import Callable, Mapping, Sequence

_LENGTH = struct.Struct("!I")  # as exportkit.child.channel


def run(
    server: str,
    command: Sequence[str],
    folder: str,
    environment: Mapping[str, str],
    files: Sequence[int],
    *,
    started: Callable[[int], object] = lambda pid: None,
    quick_end: bool = False,
) -> int:
    """Runs what `python` would with these arguments, and returns its status as subprocess does.

    Args:
        server: The address of a socket of tests/fresh_child.py.
        command: -c and code, - for a program on stdin, or a script; and arguments.
        folder: Where it works.
        environment: All of its environment.
        files: Its stdin, stdout and stderr.
        started: Is told the process id.
        quick_end: Spares 0.3 s at the end: exit functions are called, but the interpreter and torch are left as they
            are, so that what would crash there does not.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(3000)
        connection.connect(server)
        request = {"command": command, "folder": folder, "environment": dict(environment), "quick_end": quick_end}
        body = json.dumps(request).encode()
        socket.send_fds(connection, [_LENGTH.pack(len(body))], files)
        connection.sendall(body)
        with connection.makefile("rb") as answers:
            pid = _next(answers.read)
            try:
                started(pid)
                return _next(answers.read)
            except BaseException:
                os.kill(pid, signal.SIGKILL)
                raise


def _next(read: Callable[[int], bytes]) -> int:
    (length,) = _LENGTH.unpack(read(_LENGTH.size))
    return int(read(length))


def main(server: str, programs: str) -> None:
    """Is `python`, or a Python program of the folder `programs`, and ends as that does."""
    name, arguments = os.path.basename(sys.argv[0]), sys.argv[1:]
    if name != "python":
        arguments.insert(0, os.path.join(programs, name))
    elif not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-", "-c")):
        os.execv(os.path.join(programs, name), sys.argv)
    status = run(server, arguments, os.getcwd(), os.environ, (0, 1, 2), started=_forward_signals, quick_end=True)
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def _forward_signals(pid: int) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, lambda received, frame: os.kill(pid, received))
