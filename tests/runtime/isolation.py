"""What the tests of worker processes share."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

from exportkit.package.structure import flatten
from tests.subprocesses import ROOT

SEARCH = {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}


def leaves(value: object) -> list[torch.Tensor]:
    return flatten(value, lambda v: isinstance(v, torch.Tensor))[1]


def equal(one: object, other: object) -> bool:
    return all(map(torch.equal, leaves(one), leaves(other)))


def eventually(condition: Callable[[], bool], seconds: float = 600.0) -> bool:
    deadline = time.monotonic() + seconds
    while not (held := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return held


def runs(pid: int) -> bool:
    """Whether there is such a process, a zombie not counted."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def softpool_call(first: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randn(2, 4, 8)
    tokens[0, 0, 0] = first
    return tokens, torch.zeros(2, 4)
