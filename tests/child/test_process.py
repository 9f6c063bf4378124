"""Child processes start where they should, and end when they should."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from exportkit.child.child_client import ChildClient
from exportkit.child.messages import Failed, decode, encode
from exportkit.child.probe import Probe, Registrations
from exportkit.child.process import ChildProcess, describe_end
from exportkit.errors import HostError, NoTargetError
from tests.subprocesses import ROOT, run_python

PROBE = "exportkit.child.probe_worker"


def test_a_child_that_takes_no_command_is_ended_in_time() -> None:
    """Not only one that gives no answer: a long command waits until the child has read of it."""
    with ChildClient("tests.child.facts_worker", search_path="caller", with_torch=False) as child:
        os.kill(child._process.pid, signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            child.ask(Probe(("x" * (8 << 20),)), Registrations, timeout=0.2)
        assert not child.alive


def test_without_an_interpreter_there_is_no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(HostError, match="no Python interpreter"):
        ChildProcess(PROBE)


def test_a_kernel_that_starts_no_process_is_a_host_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no such file"))
    with pytest.raises(HostError, match=r"cannot start a child process: .*No such file"):
        ChildProcess(PROBE)
    assert set(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (0, "exited with status 0"),
        (-signal.SIGSEGV, "was killed by SIGSEGV (signal 11)"),
        (-signal.SIGILL, "was killed by SIGILL (signal 4: this CPU lacks an instruction)"),
        (-63, "was killed by signal 63"),
    ],
)
def test_an_end_is_put_in_words(status: int, words: str) -> None:
    assert describe_end(status) == words


@pytest.mark.parametrize(
    ("raised", "again"),
    [
        (NoTargetError("no target", hint="Give one."), NoTargetError("no target", hint="Give one.")),
        (RuntimeError("the kernel\nException raised from x (most recent call first)"), RuntimeError("the kernel")),
        (ValueError("a number"), RuntimeError("ValueError: a number")),
        (KeyError(), RuntimeError("KeyError: (no message)")),
    ],
)
def test_an_error_crosses_to_the_parent_with_its_class_and_words(raised: Exception, again: Exception) -> None:
    failed = decode(encode(Failed.of(raised)), Failed)
    assert type(failed.exception()) is type(again)
    assert str(failed.exception()) == str(again)


def test_frames_of_cpp_do_not_push_a_message_out_of_what_a_child_printed() -> None:
    with ChildClient(PROBE, search_path="installed") as child:
        output = child._process._output
        assert output is not None
        frames = "".join(f"frame #{n}: f({'x' * 400}) + 0x2a (0x7f in libtorch_cpu.so)\n" for n in range(40))
        said = f"Exception in aoti_torch: 2 ints, not 1\nException raised from call at a.cpp:1\n{frames}\n"
        output.write(said.encode())
        assert child.printed() == "Exception in aoti_torch: 2 ints, not 1"


# --- without a network ------------------------------------------------------------------------------------------------

OFFLINE = """
import socket, subprocess, sys
from exportkit.child.offline import go_offline
go_offline()
refused = []
for family in (socket.AF_INET, socket.AF_INET6):
    try:
        socket.socket(family)
    except PermissionError:
        refused.append(family)
assert len(refused) == 2, refused
socket.socketpair()
child = "import socket\\ntry:\\n    socket.socket()\\nexcept PermissionError:\\n    raise SystemExit(7)"
assert subprocess.run([sys.executable, "-c", child]).returncode == 7
"""


def test_what_is_offline_opens_no_socket_and_neither_do_its_children(tmp_path: Path) -> None:
    """As code is tried that a verification found wrong."""
    run_python(OFFLINE, cwd=tmp_path)


# --- the end of a process that has torch, which is not taken apart ----------------------------------------------------

_SCRIPT = """
import atexit, sys, threading, time
from exportkit.child.process_end import end_at_once

class Taken:
    def __del__(self):
        print("taken apart")

{before}
atexit.register(print, "registered")
kept = Taken()
print("printed")
sys.exit(end_at_once(3))
"""
TORCH = "sys.modules['torch'] = sys"
THREAD = "threading.Thread(target=lambda: (time.sleep(0.5), print('worked'))).start()"
WHOLE = ["printed", "registered", "taken apart"]


@pytest.mark.parametrize(
    ("before", "printed"),
    [(TORCH, ["printed", "registered"]), ("", WHOLE), (f"{TORCH}; {THREAD}", [*WHOLE, "worked"])],
    ids=["torch ends at once", "without torch as Python does", "a thread is waited for"],
)
def test_a_process_ends(before: str, printed: list[str]) -> None:
    command = [sys.executable, "-c", _SCRIPT.format(before=before)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert not done.stderr
    assert (done.returncode, sorted(done.stdout.split("\n")[:-1])) == (3, printed)
