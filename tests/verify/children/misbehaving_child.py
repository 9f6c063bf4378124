"""A child process that does what it is told: answers, raises, prints, dies, stalls."""

import os
import signal
import sys
import time

from exportkit.errors import NoTargetError
from exportkit.verify.protocol import serve


def fail(command):
    raise ValueError("no such thing\nException raised from somewhere (most recent call first): frame #0")


def refuse(command):
    raise NoTargetError("not here")


def die(command):
    print("about to die", file=sys.stderr, flush=True)
    os.kill(os.getpid(), command["signal"])


def leave(command):
    os._exit(command["status"])


def stall(command):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)


def chatter(command):
    print("something on stdout")
    os.write(1, b"and from C\n")
    return {"said": True}


def where(command):
    return {"cwd": os.getcwd(), "path": sys.path, "tmp": os.environ["TMPDIR"]}


def main():
    handlers = [fail, refuse, die, leave, stall, chatter, where]
    serve({handler.__name__: handler for handler in handlers} | {"echo": lambda command: command})
