"""Servers of others, as processes that listen on a port."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from collections.abc import Iterator


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def listens(port: int) -> bool:
    with socket.socket() as asking:
        return asking.connect_ex(("127.0.0.1", port)) == 0


@contextlib.contextmanager
def running(command: list[str], port: int) -> Iterator[None]:
    """Runs a command until it listens on a port, and to the end of the block."""
    process = subprocess.Popen(command)
    try:
        end = time.monotonic() + 30
        while not listens(port):
            assert process.poll() is None, command
            assert time.monotonic() < end, command
            time.sleep(0.05)
        yield
    finally:
        process.kill()
        process.wait()
