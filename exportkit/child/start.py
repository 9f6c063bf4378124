"""The first function a child process runs."""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import signal
import socket

_PR_SET_PDEATHSIG = 1


def start(module: str, connection: int, parent: int) -> None:
    """Runs `main` of a module with the socket to the parent.

    Args:
        module: The module's name.
        connection: The socket's file descriptor.
        parent: The parent's process id.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the kernel was told
        os._exit(0)
    gc.set_threshold(100_000)  # importing torch creates half a million objects and little garbage
    importlib.import_module(module).main(socket.socket(fileno=connection))
