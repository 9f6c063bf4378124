"""Starts Python processes. No other module does."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, Literal

from exportkit.child.channel import Channel
from exportkit.child.forkserver import Ended, Fork, Forked, Kill
from exportkit.child.messages import decode, encode
from exportkit.errors import HostError

SearchPath = Literal["caller", "installed"]

_ROOT = Path(__file__).resolve().parents[2]  # the folder that has exportkit
_PRINTED_CHARACTERS, _LOOKED_AT_BYTES = 4000, 64 << 10
_FRAMES = re.compile(r"^(?:frame #\d+: .*|Exception raised from .*|<omitting python frames>)\n?", re.MULTILINE)

# The beginnings of variables that nothing reads while torch is imported. Where others have changed since a forkserver
# was started, the next child gets another.
_READ_LATER = ("EXPORTKIT_", "TMPDIR", "PWD", "OLDPWD", "XDG_CONFIG_HOME")

_SIGNAL_HINTS: Mapping[int, str] = {
    signal.SIGILL: "this CPU lacks an instruction",
    signal.SIGKILL: "the kernel does so when memory runs out",
    signal.SIGABRT: "often a failed assertion",
}


def interpreter() -> str:
    """The Python interpreter that runs this process. HostError: Python is embedded in another program here."""
    if not sys.executable or getattr(sys, "frozen", False):
        raise HostError("this program has no Python interpreter that can start a child process")
    return sys.executable


def describe_end(status: int) -> str:
    """Words for a return code of subprocess: "was killed by SIGSEGV (signal 11)", "exited with status 1"."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        return f"was killed by signal {-status}"
    hint = _SIGNAL_HINTS.get(-status)
    return f"was killed by {name} (signal {-status}{f': {hint}' if hint else ''})"


class ChildProcess:
    """A Python process that runs `main(connection)` of a module, where `connection` is its end of a socket.

    It is forked from a forkserver, a process that has imported torch and nothing of the caller's: the child has the
    caller's environment, but inherits no other module. Ctrl-C in a terminal does not reach it. The kernel kills it when
    this process ends, however that happens.

    It imports from where this process does (`caller`), or what the interpreter finds by itself, and exportkit
    (`installed`): not from the working directory, since it works in an empty folder. What a captured child prints is
    kept for `printed`, rather than passed on to our stdout and stderr. `connection` is our end of the socket.
    HostError: there is no Python interpreter, or the kernel refused to start a process.
    """

    def __init__(
        self,
        module: str,
        *,
        search_path: SearchPath = "caller",
        captured: bool = False,
        with_torch: bool = True,
        forkservers: Forkservers | None = None,
    ) -> None:
        self._owner = os.getpid()
        self._forkserver = (forkservers or _in_use)._forkserver(with_torch)
        self._pid: int | None = None
        self._status: int | None = None
        self._forked, self._ended = threading.Event(), threading.Event()
        # torch's loader unpacks into TMPDIR, and a killed process cannot clean up.
        self._folder = tempfile.TemporaryDirectory(prefix="exportkit-child-", ignore_cleanup_errors=True)
        self._output: BinaryIO | None = tempfile.TemporaryFile() if captured else None  # noqa: SIM115 (end() closes it)
        self.connection, theirs = socket.socketpair()
        with theirs:
            output, errors = (1, 2) if self._output is None else (self._output.fileno(),) * 2
            self._forkserver.fork(
                self,
                Fork(
                    child=id(self),
                    module=module,
                    path=tuple(filter(os.path.isabs, sys.path)) if search_path == "caller" else None,
                    folder=_working_folder(self._folder.name) if search_path == "caller" else self._folder.name,
                    environment={"OMP_WAIT_POLICY": "PASSIVE", **os.environ, "TMPDIR": self._folder.name},
                ),
                (theirs.fileno(), output, errors),
            )

    @property
    def pid(self) -> int:
        """The child's process id."""
        self._forked.wait()
        assert self._pid is not None
        return self._pid

    @property
    def is_ours(self) -> bool:
        """Whether this process started the child. A fork of this process inherits the object, but must not use it."""
        return os.getpid() == self._owner

    def wait(self, timeout: float | None = None) -> int | None:
        """The return code; None if the child still runs after `timeout` seconds."""
        self._ended.wait(timeout)
        return self._status

    def end(self) -> None:
        """Kills the child, whatever it is doing, and forgets what it printed. Calling it again does no harm."""
        if self.is_ours:
            self._forkserver.kill(self)
            if self._output is not None:
                self._output.close()

    def printed(self) -> str:
        """The end of what a captured child has printed so far, without the frames of C++ below torch's messages."""
        assert self._output is not None
        size = self._output.seek(0, os.SEEK_END)
        self._output.seek(max(0, size - _LOOKED_AT_BYTES))
        text = _FRAMES.sub("", self._output.read().decode(errors="replace"))
        return text[-_PRINTED_CHARACTERS:].strip()

    def _set_pid(self, pid: int) -> None:
        self._pid = pid
        self._forked.set()

    def _set_status(self, status: int) -> None:
        """Remembers how the child ended, and removes its files."""
        self._folder.cleanup()
        self._status = status
        self._forked.set()
        self._ended.set()


def _working_folder(otherwise: str) -> str:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return otherwise


# --- forkservers ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Conditions:
    """What a forkserver has taken over from its parent when it was started, and its children have from it.

    OpenMP's threads spin while they wait, unless OMP_WAIT_POLICY says otherwise: two processes share the same cores
    here, and one would slow the other down.
    """

    owner: int
    interpreter: str
    torch: str | None
    environment: Mapping[str, str]
    limits: Sequence[tuple[int, int]]


Started = tuple[socket.socket, Callable[[], int]]  # our end of a socket to a forkserver, what waits for its return code


def start_forkserver(conditions: Conditions, *, first: Sequence[str] = ()) -> Started:
    """Starts an interpreter as a forkserver."""
    connection, theirs = socket.socketpair()
    with theirs, contextlib.ExitStack() as undo:
        undo.callback(connection.close)
        # '' is the working directory. The search path is set before anything of ours is imported.
        code = (
            f"import sys; sys.path[:] = [*filter(None, sys.path), {str(_ROOT)!r}]; "
            "from exportkit.child.forkserver import serve; "
            f"serve({theirs.fileno()}, {conditions.owner}, {conditions.torch!r}, {tuple(first)!r})"
        )
        process = subprocess.Popen(
            [conditions.interpreter, "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ},
            start_new_session=True,
        )
        undo.pop_all()
    return connection, process.wait


class Forkservers:
    """The forkservers of this process: one with torch and one without, started again where the process has changed.

    They import the modules `first` after torch, so that their children have them at once; `read_later` are the
    beginnings of more variables of the environment that nothing reads during these imports.
    """

    def __init__(
        self, *first: str, read_later: Sequence[str] = (), start: Callable[[Conditions], Started] | None = None
    ) -> None:
        self._read_later = (*_READ_LATER, *read_later)
        self._start = start or partial(start_forkserver, first=first)
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def conditions(self, with_torch: bool) -> Conditions:
        """Those of this process. HostError: there is no Python interpreter."""
        spec = importlib.util.find_spec("torch") if with_torch else None
        limits = [resource.getrlimit(each) for name, each in vars(resource).items() if name.startswith("RLIMIT_")]
        environment = {name: value for name, value in os.environ.items() if not name.startswith(self._read_later)}
        return Conditions(os.getpid(), interpreter(), spec.origin if spec else None, environment, limits)

    def start(self) -> None:
        """Starts the forkserver that has torch, which it can import while this process does other things."""
        with contextlib.suppress(HostError):  # the first child will raise it again
            self._forkserver(with_torch=True)

    def retire(self) -> None:
        """Ends each forkserver when its last child has ended."""
        with self._lock:
            for forkserver in self._running.values():
                forkserver.retire()
            self._running.clear()

    def _forkserver(self, with_torch: bool) -> _Forkserver:
        """The forkserver of this process as it is now."""
        conditions = self.conditions(with_torch)
        with self._lock:
            found = self._running.get(with_torch)
            if found is None or not found.alive or found.conditions != conditions:
                self._running[with_torch] = _Forkserver(conditions, self._start)
                if found is not None:
                    found.retire()
            return self._running[with_torch]

    def _forget(self) -> None:
        """In a fork: the forkservers are the parent's."""
        self._lock = threading.Lock()
        self._running: dict[bool, _Forkserver] = {}


class _Forkserver:
    """The process of exportkit.child.forkserver, and its children. HostError: the kernel refused to start it."""

    def __init__(self, conditions: Conditions, start: Callable[[Conditions], Started]) -> None:
        self.conditions = conditions
        self._start = start
        # The garbage collector may end a child while its thread is in here.
        self._lock = threading.RLock()
        self._children: dict[int, ChildProcess] = {}
        self._retired = False
        self._status: int | None = None
        self._failure: OSError | None = None
        # The kernel kills the forkserver (PR_SET_PDEATHSIG) when the thread that started it ends, not the process. This
        # thread lives as long as the forkserver.
        started = threading.Event()
        self._watcher = threading.Thread(target=self._watch, args=(started,), daemon=True)
        self._watcher.start()
        started.wait()
        if self._failure is not None:
            raise HostError(f"cannot start a child process: {self._failure}") from self._failure

    @property
    def alive(self) -> bool:
        """Whether it can fork."""
        return self._status is None

    def fork(self, child: ChildProcess, message: Fork, files: Sequence[int]) -> None:
        """Starts a child. Where the forkserver has ended, the child has, in the same way."""
        with self._lock:
            if self._status is None:
                self._children[message.child] = child
                with contextlib.suppress(ConnectionError):  # the watcher will notice, too
                    self._channel.send(encode(message), files)
                return
        child._set_status(self._status)

    def kill(self, child: ChildProcess) -> None:
        """Kills a child, if it has not ended."""
        with self._lock, contextlib.suppress(ConnectionError):
            if id(child) in self._children:
                self._channel.send(encode(Kill(id(child))))
        if threading.current_thread() is not self._watcher:  # the garbage collector may run this there
            child.wait(10)

    def retire(self) -> None:
        """Ends the forkserver when its last child has ended."""
        with self._lock:
            self._retired = True
            if not self._children:
                self._channel.shut_down()

    def _watch(self, started: threading.Event) -> None:
        """Starts the forkserver, and stays until it ends."""
        try:
            connection, wait = self._start(self.conditions)
            self._channel = Channel(connection)
        except OSError as error:
            self._failure = error
            return
        finally:
            started.set()
        with contextlib.suppress(ConnectionError):
            while True:
                message = decode(self._channel.receive()[0], Forked | Ended)
                child = self._children[message.child]
                if isinstance(message, Forked):
                    child._set_pid(message.pid)
                else:
                    self._end(child, message.status)
        status = wait()
        with self._lock:
            self._status = status
            self._channel.close()
        for child in list(self._children.values()):
            self._end(child, status)

    def _end(self, child: ChildProcess, status: int) -> None:
        child._set_status(status)
        with self._lock:
            del self._children[id(child)]
            if self._retired and not self._children:
                self._channel.shut_down()


_in_use = Forkservers()


def start_forkserver_early() -> None:
    """Starts the forkserver of the children that will come."""
    _in_use.start()


def use_forkservers(forkservers: Forkservers) -> Forkservers:
    """From now on children that name no forkservers are forked from these. Returns those that they were forked from."""
    global _in_use
    before, _in_use = _in_use, forkservers
    return before
