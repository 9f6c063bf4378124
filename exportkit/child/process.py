"""Starts Python processes. No other module does."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, Literal

from exportkit.errors import HostError

SearchPath = Literal["caller", "installed"]

_ROOT = Path(__file__).resolve().parents[2]  # the folder that has exportkit
_PRINTED_BYTES = 4000

_SIGNAL_HINTS: Mapping[int, str] = {
    signal.SIGILL: ", an instruction this CPU does not have,",
    signal.SIGKILL: ", as the kernel does when memory runs out,",
    signal.SIGABRT: ", as a failed assertion or a second registration of an operator does,",
}


def interpreter() -> str:
    """The Python interpreter that runs this process.

    Raises:
        HostError: Python is embedded in another program here, so there is no interpreter to start.
    """
    if not sys.executable or getattr(sys, "frozen", False):
        raise HostError("this program has no Python interpreter that can start a child process")
    return sys.executable


def describe_end(status: int) -> str:
    """Words for a return code of subprocess: "was killed by SIGSEGV (signal 11)", "exited with status 1"."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        name = f"{signal.Signals(-status).name} (signal {-status})"
    except ValueError:
        name = f"signal {-status}"
    return f"was killed by {name}{_SIGNAL_HINTS.get(-status, '')}"


class ChildProcess:
    """A Python process that runs `main(connection)` of a module, where `connection` is its end of a socket.

    The child has the caller's environment, but inherits no imported module. Ctrl-C in a terminal does not reach it. The
    kernel kills it when this process ends, however that happens.

    Args:
        module: The module whose `main` the child runs.
        search_path: Where the child imports from. `caller`: where this process does. `installed`: what the interpreter
            finds by itself, and exportkit; not the working directory, since the child works in an empty folder.
        captured: Keeps what the child prints for `printed`, rather than passing it on to our stdout and stderr.

    Attributes:
        connection: Our end of the socket.

    Raises:
        HostError: There is no Python interpreter, or the kernel refused to start a process.
    """

    def __init__(self, module: str, *, search_path: SearchPath = "caller", captured: bool = False) -> None:
        command = interpreter()
        self._owner = os.getpid()
        self._process: subprocess.Popen[bytes] | None = None
        self._failure: OSError | None = None
        self._started = threading.Event()
        self._output: BinaryIO | None = tempfile.TemporaryFile() if captured else None  # noqa: SIM115 (end() closes it)
        self.connection, theirs = socket.socketpair()
        # The kernel kills the child (PR_SET_PDEATHSIG) when the thread that started it ends, not the process. This
        # thread lives as long as the child.
        self._watcher = threading.Thread(
            target=self._watch, args=(command, module, search_path, theirs), daemon=True, name="exportkit child"
        )
        self._watcher.start()
        self._started.wait()
        if self._failure is not None:
            self.connection.close()
            self._let_go()
            raise HostError(f"cannot start a child process: {self._failure}") from self._failure

    @property
    def pid(self) -> int:
        """The child's process id."""
        assert self._process is not None
        return self._process.pid

    @property
    def is_ours(self) -> bool:
        """Whether this process started the child. A fork of this process inherits the object, but must not use it."""
        return os.getpid() == self._owner

    def wait(self, timeout: float | None = None) -> int | None:
        """The return code; None if the child still runs after `timeout` seconds."""
        assert self._process is not None
        self._watcher.join(timeout)
        return self._process.returncode

    def end(self) -> None:
        """Kills the child, whatever it is doing, and forgets what it printed. Calling it again does no harm."""
        if self.is_ours and self._process is not None:
            self._process.kill()
            self._let_go()

    def printed(self) -> str:
        """The end of what a captured child has printed so far."""
        assert self._output is not None
        size = self._output.seek(0, os.SEEK_END)
        self._output.seek(max(0, size - _PRINTED_BYTES))
        return self._output.read().decode(errors="replace").strip()

    def _let_go(self) -> None:
        """Waits until the child's folder is removed, and closes the file with what it printed."""
        if threading.current_thread() is not self._watcher:  # the garbage collector may run this in the watcher
            self._watcher.join(10)
        if self._output is not None:
            self._output.close()

    def _watch(self, command: str, module: str, search_path: SearchPath, theirs: socket.socket) -> None:
        """Starts the child and stays until it ends; then its temporary files are removed."""
        # torch's loader unpacks into TMPDIR, and a killed process cannot clean up. OpenMP's threads spin while they
        # wait: two processes share the same cores here, and one would slow the other down.
        with theirs, tempfile.TemporaryDirectory(prefix="exportkit-child-", ignore_cleanup_errors=True) as folder:
            try:
                self._process = subprocess.Popen(
                    [command, "-c", _first_code(module, search_path, theirs.fileno(), self._owner)],
                    stdin=subprocess.DEVNULL,
                    stdout=self._output,
                    stderr=self._output,
                    cwd=folder if search_path == "installed" else None,
                    pass_fds=[theirs.fileno()],
                    env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ, "TMPDIR": folder},
                    start_new_session=True,
                )
            except OSError as error:
                self._failure = error
                return
            finally:
                theirs.close()
                self._started.set()
            self._process.wait()


def _first_code(module: str, search_path: SearchPath, connection: int, parent: int) -> str:
    """What the interpreter is told to run: it sets the search path before anything of ours is imported."""
    if search_path == "caller":
        path = repr([entry for entry in sys.path if os.path.isabs(entry)])
    else:
        path = f"[*filter(None, sys.path), {str(_ROOT)!r}]"  # '' is the working directory
    return (
        f"import sys; sys.path[:] = {path}; from exportkit.child.start import start; "
        f"start({module!r}, {connection}, {parent})"
    )
