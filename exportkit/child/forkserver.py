"""The forkserver: a process that has imported torch and nothing of ours, from which children are forked.

Importing torch takes seconds, and a fork has it at once. Nothing runs in the forkserver, so that a child is as fresh as
a new interpreter that has imported torch.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import os
import select
import signal
import socket
import sys
import tempfile

from exportkit.child.channel import Channel
from exportkit.child.messages import Message, decode, encode
from exportkit.child.process_end import end_with


class Fork(Message, frozen=True):
    """Tells the forkserver to fork a child. The answers are Forked and, when the child has ended, Ended.

    Three files come with it: the child's end of the socket to the parent, its stdout and its stderr. It has the
    parent's number for the child, the module whose `main` the child runs, its sys.path if that is not the forkserver's,
    where it works, and all of its environment.
    """

    child: int
    module: str
    path: tuple[str, ...] | None
    folder: str
    environment: dict[str, str]


class Kill(Message, frozen=True):
    """Tells the forkserver to kill a child. Nothing happens if the child has ended."""

    child: int


class Forked(Message, frozen=True):
    """The process id of a child."""

    child: int
    pid: int


class Ended(Message, frozen=True):
    """The return code of a child, as subprocess has it."""

    child: int
    status: int


def serve(connection: int, parent: int, torch: str | None, first: tuple[str, ...] = ()) -> None:
    """Forks children until the parent ends. Returns in each child when its `main` has returned.

    `torch` is where the parent's torch is, which is imported if this process would import the same, and after it the
    modules `first`.
    """
    end_with(parent)
    gc.set_threshold(100_000)  # importing torch creates half a million objects and little garbage
    if torch is not None:
        # What an import raises, a child that imports torch will raise again, where it can be told.
        with contextlib.suppress(Exception):
            spec = importlib.util.find_spec("torch")
            if spec is not None and spec.origin == torch:
                for module in ("torch", *first):
                    importlib.import_module(module)
    gc.freeze()  # a collection in a child would copy the pages of what it looks at
    if (fork := _Forkserver(socket.socket(fileno=connection)).serve()) is not None:
        _run(*fork)


class _Forkserver:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._channel = Channel(connection)
        self._pids: dict[int, int] = {}  # by the parent's number
        self._woken, self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def serve(self) -> tuple[Fork, list[int]] | None:
        """Serves the parent. Returns in a child what it was forked for, else None when the parent ends."""
        signal.signal(signal.SIGCHLD, lambda *_: None)  # a signal without a handler wakes nobody
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        with contextlib.suppress(ConnectionError):
            while True:
                readable, _, _ = select.select([self._connection.fileno(), self._woken], [], [])
                if self._woken in readable:
                    os.read(self._woken, 4096)
                    self._reap()
                if self._connection.fileno() in readable:
                    body, files = self._channel.receive()
                    message = decode(body, Fork | Kill)
                    if isinstance(message, Kill):
                        if message.child in self._pids:
                            os.kill(self._pids[message.child], signal.SIGKILL)
                    elif self._fork(message, files):
                        return message, files
        return None

    def _fork(self, message: Fork, files: list[int]) -> bool:
        """Forks. Returns whether this is the child."""
        forkserver = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            os.write(files[-1], f"cannot start a child process: {error}\n".encode())
            self._channel.send(encode(Ended(message.child, os.EX_OSERR)))
            pid = -1
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for file in (self._woken, self._wake):
                os.close(file)
            self._channel.close()
            os.setsid()
            end_with(forkserver)
            return True
        for file in files:
            os.close(file)
        if pid > 0:
            self._pids[message.child] = pid
            self._channel.send(encode(Forked(message.child, pid)))
        return False

    def _reap(self) -> None:
        """Tells the parent of the children that have ended."""
        for child, pid in list(self._pids.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self._pids[child]
                self._channel.send(encode(Ended(child, os.waitstatus_to_exitcode(status))))


def _run(fork: Fork, files: list[int]) -> None:
    """Becomes the child."""
    connection, *outputs = files
    for output, standard in zip(outputs, (1, 2)):
        os.dup2(output, standard)
        os.close(output)
    os.environ.clear()
    os.environ.update(fork.environment)
    tempfile.tempdir = None  # from the environment again
    os.chdir(fork.folder)
    if fork.path is not None:
        sys.path[:] = fork.path
    importlib.import_module(fork.module).main(socket.socket(fileno=connection))
