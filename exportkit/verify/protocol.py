"""The child's side of the conversation.

Imports nothing that the replay process must not have, and torch only where a handler does.
"""

from __future__ import annotations

import functools
import operator
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from exportkit.verify.messages import Failed, Message, decode, encode


def serve(handlers: Mapping[type[Message], Callable[[Any], Message]]) -> None:
    """Answers commands until the parent closes its end, each with what the handler of its class returns."""
    # What libraries print goes to stderr, so that nothing but answers is on the wire.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    commands = functools.reduce(operator.or_, handlers)
    for line in sys.stdin.buffer:
        command = decode(line, commands)  # a command that is none is a bug, and ends this process
        try:
            answer = handlers[type(command)](command)
        except Exception as error:
            answer = Failed.of(error)
        answers.write(encode(answer))
        answers.flush()
