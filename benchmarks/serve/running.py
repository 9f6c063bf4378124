"""A server process: started on some cores, waited for, its processor time and memory read, ended."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from benchmarks.children import ROOT, SEARCH_PATH

_START_SECONDS = 180.0
_END_SECONDS = 60.0  # Ray takes 20 to drain a replica


def free_port() -> int:
    """Returns a port that nothing listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def serve_command(package: Path, port: int, *options: str) -> list[str]:
    """Returns the command that serves a package with exportkit."""
    command = [sys.executable, "-m", "exportkit", "serve", str(package), "--port", str(port), "--no-grpc"]
    return [*command, "--no-access-log", *options]


class Server:
    """A server and the processes that it started."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        """Use `running`."""
        self.process = process
        self.port = port
        self._ps = psutil.Process(process.pid)

    def processes(self) -> list[psutil.Process]:
        """Returns the running processes: the server, and those that it started."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return [self._ps, *self._ps.children(recursive=True)]
        return []

    def cpu_seconds(self) -> float:
        """Returns the processor time of all of them."""
        total = 0.0
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                total += sum(process.cpu_times()[:2])
        return total

    def memory(self) -> int:
        """Returns the bytes of memory that the processes use. Shared memory counts once."""
        total = 0
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                total += process.memory_full_info().pss
        return total

    def own_memory(self) -> int:
        """Returns the bytes of memory of the processes, without the files that they map.

        How much of a library counts as theirs depends on who else on this machine has it mapped.
        """
        total = 0
        for process in self.processes():
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
                    if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
                        total += int(line.split()[1]) << 10
        return total


@contextlib.contextmanager
def running(
    command: Sequence[str], port: int, *, cores: set[int], log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """Starts a server and waits until its port answers; ends it, by SIGTERM first.

    Raises:
        RuntimeError: It ended, or does not listen in three minutes. The log says why.
    """
    everything = dict(os.environ, PYTHONPATH=SEARCH_PATH, **(environment or {}))
    with log.open("wb") as written:
        process = subprocess.Popen(
            list(command),
            stdout=written,
            stderr=subprocess.STDOUT,
            env=everything,
            cwd=ROOT,
            start_new_session=True,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )
    server = Server(process, port)
    try:
        deadline = time.monotonic() + _START_SECONDS
        while not _listens(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server does not listen on port {port}: see {log}")
            time.sleep(0.1)
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)
        for one in psutil.pids():  # also those whose parent has ended
            with contextlib.suppress(OSError):
                if os.getsid(one) == process.pid:
                    os.kill(one, signal.SIGKILL)
        process.wait()


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", port)).close()
        return True
    return False
