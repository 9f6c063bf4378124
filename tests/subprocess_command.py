"""What the programs of `fresh.commands` run: they let a process of tests/subprocesses.py start what they stand for."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

from exportkit.child.channel import Channel


def main(server: str, programs: str) -> None:
    """Is `python`, or a Python program of the folder `programs`, and ends as that does."""
    name, command = os.path.basename(sys.argv[0]), sys.argv[1:]
    if name != "python":
        command.insert(0, os.path.join(programs, name))
    elif not command or (command[0].startswith("-") and command[0] not in ("-", "-c")):
        os.execv(os.path.join(programs, name), sys.argv)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(server)
    channel = Channel(connection)
    request = {"command": command, "folder": os.getcwd(), "environment": dict(os.environ)}
    channel.send(json.dumps(request).encode(), (0, 1, 2))
    pid = int(channel.receive()[0])
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, lambda received, _: os.kill(pid, received))
    status = int(channel.receive()[0])
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)
