"""Runs work in a fork of this process, which a crash ends, and knows what the work was doing then."""

from __future__ import annotations

import faulthandler
import linecache
import mmap
import os
import re
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from exportkit.child.process_end import end_at_once, end_with
from exportkit.progress import note_with

_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_NOTED_BYTES = 4096
_FRAME = re.compile(rb'^  File "(.+\.py)", line (\d+) in (.+)$', re.MULTILINE)
_NOT_USERS = (str(Path(__file__).parents[1]), "/site-packages/", "/dist-packages/", "/lib/python3.")


@dataclass(frozen=True)
class Crash:
    """How a fork ended that did not end by itself: the signal's number, negative, and the last step that was noted.

    The node is the operator of the graph that was noted last in that step, and the line is that of the user's code that
    ran, as "model.py:12 in forward: `x + 1`"; both may be empty.
    """

    status: int
    step: str
    node: str
    line: str


def run_supervised(work: Callable[[], int]) -> int | Crash:
    """Runs work in a fork, which ends with what the work returned, and returns that, or how it crashed.

    It must be called before threads exist and before torch is imported, which does not survive a fork. Ctrl-C is left
    to the fork, and other signals that end a process are passed on to it.
    """
    noted = mmap.mmap(-1, _NOTED_BYTES)
    stack = os.memfd_create("exportkit-stack")
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        end_with(parent, signal.SIGTERM)
        # OpenMP's threads would spin while they wait. The compilers, and other processes, need the cores meanwhile.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        faulthandler.enable(stack, all_threads=False)
        note_with(_Notes(noted))
        sys.exit(end_at_once(work()))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in _FORWARDED:
        signal.signal(number, lambda received, _: os.kill(pid, received))
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code >= 0:
        return code
    if -code in _FORWARDED:  # somebody ended it
        signal.signal(-code, signal.SIG_DFL)
        os.kill(parent, -code)
    step, _, node = noted[:].rstrip(b"\0").decode(errors="replace").partition("\n")
    return Crash(code, step, node, _users_line(os.pread(stack, 1 << 20, 0)))


class _Notes:
    """Writes the step and the node of the graph where the parent can read them after a crash."""

    def __init__(self, noted: mmap.mmap) -> None:
        self._noted, self._step = noted, ""

    def __call__(self, step: str, node: str) -> None:
        self._step = step or self._step
        text = f"{self._step}\n{node}".encode()[:_NOTED_BYTES]
        self._noted[:] = text.ljust(_NOTED_BYTES, b"\0")


def _users_line(stack: bytes) -> str:
    """Returns the innermost line of the user's code in a stack of faulthandler's, or ""."""
    for file, line, name in _FRAME.findall(stack):
        path = os.fsdecode(file)
        if not any(part in path for part in _NOT_USERS):
            code = linecache.getline(path, int(line)).strip()
            return f"{Path(path).name}:{int(line)} in {name.decode()}" + (f": `{code}`" if code else "")
    return ""
