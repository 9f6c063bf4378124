"""A child process that does what it is told: answers, raises, prints, dies, stalls."""

import os
import signal
import sys
import time

from exportkit.child.messages import Message, serve


class Echo(Message, frozen=True):
    text: str
    number: int = 0


class Die(Message, frozen=True):
    signal: int


class Leave(Message, frozen=True):
    status: int


class Stall(Message, frozen=True):
    pass


class Chatter(Message, frozen=True):
    pass


class Where(Message, frozen=True):
    pass


class Here(Message, frozen=True):
    cwd: str
    path: list[str]
    tmp: str


def die(command):
    print("about to die", file=sys.stderr, flush=True)
    os.kill(os.getpid(), command.signal)


def leave(command):
    os._exit(command.status)


def stall(command):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)


def chatter(command):
    print("something on stdout")
    os.write(1, b"and from C\n")
    return Echo("said")


def where(command):
    return Here(os.getcwd(), sys.path, os.environ["TMPDIR"])


def main(connection):
    handlers = {Die: die, Leave: leave, Stall: stall, Chatter: chatter, Where: where}
    serve(connection, {**handlers, Echo: lambda command: command})
