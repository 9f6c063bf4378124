"""The child's side of the conversation: one JSON line in, one JSON line out. Tensors travel in files beside it.

Imports nothing that the replay process must not have, and torch only where a handler does.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from exportkit.errors import ExportkitError

Handler = Callable[[dict[str, Any]], dict[str, Any]]


def serve(handlers: Mapping[str, Handler]) -> None:
    """Answers commands until the parent closes its end.

    A command is `{"do": name, ...}`. The answer is what the handler returns, or `{"error": class, "detail": text,
    "exit_code": n or null}` where it raised: whatever a model raises is a finding for the parent to judge.
    """
    # What libraries print goes to stderr, so that nothing but answers is on the wire.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = handlers[command.pop("do")](command)
        except Exception as error:
            answer = {
                "error": type(error).__name__,
                "detail": _detail(error),
                "exit_code": error.exit_code if isinstance(error, ExportkitError) else None,
            }
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _detail(error: Exception) -> str:
    text = str(error).strip()
    # torch appends its own C++ stack to some messages; the first part is the message.
    return text.split("\nException raised from ", 1)[0] or "(no message)"
