"""A child process that does what it is told: answers, prints, ends."""

import os
import sys

from exportkit.child.messages import Message, serve


class Echo(Message, frozen=True):
    text: str
    number: int = 0


class Leave(Message, frozen=True):
    status: int


class Chatter(Message, frozen=True):
    pass


class Where(Message, frozen=True):
    pass


class Here(Message, frozen=True):
    cwd: str
    path: list[str]
    tmp: str


def leave(command):
    os._exit(command.status)


def chatter(command):
    print("something on stdout")
    os.write(1, b"and from C\n")
    return Echo("said")


def where(command):
    return Here(os.getcwd(), sys.path, os.environ["TMPDIR"])


def main(connection):
    handlers = {Leave: leave, Chatter: chatter, Where: where}
    serve(connection, {**handlers, Echo: lambda command: command})
