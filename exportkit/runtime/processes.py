"""How child processes are started and watched, and how the end of one is put in words."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping

from exportkit.errors import HostError

_SIGNAL_HINTS: Mapping[int, str] = {
    signal.SIGILL: ", an instruction this CPU does not have,",
    signal.SIGKILL: ", as the kernel does when memory runs out,",
    signal.SIGABRT: ", as a failed assertion or a second registration of an operator does,",
}


def describe_end(status: int) -> str:
    """Of a return code as subprocess has it: "was killed by SIGSEGV (signal 11)", "exited with status 1"."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        name = f"{signal.Signals(-status).name} (signal {-status})"
    except ValueError:
        name = f"signal {-status}"
    return f"was killed by {name}{_SIGNAL_HINTS.get(-status, '')}"


class WorkerProcess:
    """A child process that runs `main(connection, parent)` of a module: its end of a socket, and our process's id.

    It has our interpreter, our module search path and our environment, but no module of ours is imported in it, neither
    `__main__` nor a model's source. Ctrl-C in a terminal does not reach it, and is ours alone to handle.

    `connection` is our end of the socket.
    """

    def __init__(self, module: str) -> None:
        """Starts it: HostError where there is no Python interpreter to start, or no process to be had."""
        if not sys.executable or getattr(sys, "frozen", False):
            raise HostError("this program has no Python interpreter that could run a worker process")
        self._owner = os.getpid()
        self._process: subprocess.Popen[bytes] | None = None
        self._failure: OSError | None = None
        self._started = threading.Event()
        self.connection, theirs = socket.socketpair()
        # PR_SET_PDEATHSIG, by which the kernel ends a worker after us, goes by the thread that started it, not by the
        # process: this one lives as long as the worker.
        self._watcher = threading.Thread(
            target=self._watch, args=(module, theirs), daemon=True, name="exportkit worker"
        )
        self._watcher.start()
        self._started.wait()
        if self._failure is not None:
            self.connection.close()
            raise HostError(f"cannot start a worker process: {self._failure}") from self._failure

    @property
    def pid(self) -> int:
        """Of the process."""
        assert self._process is not None
        return self._process.pid

    @property
    def is_ours(self) -> bool:
        """Whether this process started it; a fork of that one has the object as well, and no use of it."""
        return os.getpid() == self._owner

    def how_it_ended(self, timeout: float) -> str | None:
        """In words; None if it has not ended within `timeout` seconds."""
        assert self._process is not None
        self._watcher.join(timeout)
        return None if self._process.returncode is None else describe_end(self._process.returncode)

    def end(self) -> None:
        """Kills it, whatever it is doing. Once more does no harm."""
        if self.is_ours and self._process is not None:
            self._process.kill()
            if threading.current_thread() is not self._watcher:  # which may collect what owned this
                self._watcher.join(10)

    def _watch(self, module: str, theirs: socket.socket) -> None:
        """The watcher's life: the process's. What it left behind goes with it, however it ended."""
        path = [entry for entry in sys.path if os.path.isabs(entry)]
        code = f"import sys; sys.path[:] = {path!r}; from {module} import main; main({theirs.fileno()}, {self._owner})"
        # torch's loader unpacks into TMPDIR, and a process that is killed leaves that there. OpenMP's threads spin for
        # work by default: two processes take turns on the same cores, and one would starve the other.
        with theirs, tempfile.TemporaryDirectory(prefix="exportkit-worker-", ignore_cleanup_errors=True) as folder:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-c", code],
                    stdin=subprocess.DEVNULL,
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
