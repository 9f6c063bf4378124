"""The parent's side of the conversation with a child process: a crash or a stall is an answer, not an exception."""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import sys
import time
from pathlib import Path
from typing import TypeVar

import exportkit
from exportkit.verify.messages import Failed, Message, decode, encode
from exportkit.verify.outcomes import Crashed, TimedOut

_ROOT = Path(exportkit.__file__).resolve().parent.parent
_TAIL_BYTES = 4000
LOAD_TIMEOUT = 120.0  # seconds at least, for a first command: importing torch from a cold disk takes up to a minute

M = TypeVar("M", bound=Message)


class Worker:
    """A child process that answers commands.

    Args:
        module: What it runs: `main()` of this module.
        folder: A private directory for what it prints and for its temporary files.
        cwd: Its working directory. With `folder`, nothing of the caller's directory can be imported.
    """

    def __init__(self, module: str, *, folder: Path, cwd: Path) -> None:
        # Not `python -m`: that needs exportkit on the path before there is one, and an installed package and a source
        # tree must behave alike. The root goes last, where it shadows nothing.
        code = f"import sys; sys.path.append({str(_ROOT)!r}); from {module} import main; main()"
        safe_path = ["-P"] if sys.version_info >= (3, 11) and cwd == folder else []
        # Open as long as the child is: close() ends both.
        self._output = open(folder / f"{module.rpartition('.')[2]}-{time.monotonic_ns()}.log", "w+b")  # noqa: SIM115
        self._buffer = b""
        self._ended: Crashed | TimedOut | None = None
        # What a child leaves in TMPDIR when it crashes goes with the folder. OpenMP's threads spin for work by
        # default: here two processes take turns on the same cores, and one would starve the other.
        environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ, "TMPDIR": str(folder)}
        self._process = subprocess.Popen(
            [sys.executable, *safe_path, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._output,
            cwd=cwd,
            env=environment,
        )

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return self._process.poll() is None

    def ask(self, command: Message, answer: type[M], *, doing: str, timeout: float) -> M | Failed | Crashed | TimedOut:
        """One command, one answer. Of a child that has ended, how it did.

        Args:
            command: Which the child has a handler for.
            answer: What that handler returns.
            doing: What that is, for the messages: "running case 0".
            timeout: Seconds after which the child is killed.
        """
        if self._ended is not None:
            return self._ended
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(encode(command))
            self._process.stdin.flush()
        except BrokenPipeError:
            return self._crashed(doing, timeout)
        line = self._read_line(timeout)
        if line is None:
            return self._timed_out(doing, timeout)
        if not line.endswith(b"\n"):
            return self._crashed(doing, timeout)
        answered: M | Failed = decode(line, answer | Failed)
        return answered

    def close(self) -> None:
        """Ends the child, whatever it is doing."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._process.stdout.close()
        self._output.close()
        with contextlib.suppress(BrokenPipeError):  # an unsent command of a child that is gone
            self._process.stdin.close()

    def _read_line(self, timeout: float) -> bytes | None:
        """A line; what there is of one at the end of the stream; None when the time is over."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(deadline - time.monotonic(), 0)):
                    return None
                block = os.read(self._process.stdout.fileno(), 1 << 16)
                if not block:
                    break
                self._buffer += block
        line, newline, self._buffer = self._buffer.partition(b"\n")
        return line + newline

    def _timed_out(self, doing: str, timeout: float) -> TimedOut:
        self.close()
        self._ended = TimedOut(timeout, doing)
        return self._ended

    def _crashed(self, doing: str, timeout: float) -> Crashed | TimedOut:
        try:
            status = self._process.wait(timeout)
        except subprocess.TimeoutExpired:  # closed its end of the pipe, and goes on
            return self._timed_out(doing, timeout)
        printed = self.printed()
        self.close()
        killed = status < 0
        self._ended = Crashed(-status if killed else None, None if killed else status, doing, printed)
        return self._ended

    def printed(self) -> str:
        """The end of what the child wrote to stdout and stderr."""
        self._output.flush()
        size = self._output.seek(0, os.SEEK_END)
        self._output.seek(max(0, size - _TAIL_BYTES))
        return self._output.read().decode(errors="replace").strip()
