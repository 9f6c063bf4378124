"""A child process that tells about itself."""

from __future__ import annotations

import os
import socket
import sys

from exportkit.child.messages import Message, serve


class Ask(Message, frozen=True):
    """Asks for the facts."""


class Facts(Message, frozen=True):
    parent: int
    modules: tuple[str, ...]
    environment: dict[str, str]
    folder: str
    path: tuple[str, ...]
    files: tuple[str, ...]


def facts(_: Ask) -> Facts:
    """The facts."""
    files = tuple(os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd") if n != "3")
    return Facts(os.getppid(), tuple(sys.modules), dict(os.environ), os.getcwd(), tuple(sys.path), tuple(sorted(files)))


def main(connection: socket.socket) -> None:
    """Serves the parent."""
    serve(connection, {Ask: facts})
