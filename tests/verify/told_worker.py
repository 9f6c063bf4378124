"""What stands in for VerifyWorker: it answers, when it is heard, what it was told."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch

from exportkit.child.messages import Failed, Message
from exportkit.package.archive import PackageReader
from exportkit.verify import replay
from exportkit.verify.options import VerifyOptions
from exportkit.verify.replay_worker import Replay, handlers
from exportkit.verify.verify import verify


class Told:
    """A subclass has `ask`."""

    def tell(self, command: Any) -> None:
        self._told = command

    def hear(self, answer: Any, **options: Any) -> Any:
        return self.ask(self._told, answer, **options)

    def ask(self, command: Any, answer: Any, **options: Any) -> Any:
        raise NotImplementedError


class HereWorker(Told):
    """Stands in for the replay process, so that a test can plant errors in what runs the package."""

    def __init__(self, module: str, **options: Any) -> None:
        self._handlers = handlers(Replay())
        self.alive = True

    def ask(self, command: Message, answer: type[Message], *, doing: str, timeout: float) -> Any:
        try:
            return self._handlers[type(command)](command)
        except Exception as error:
            return Failed.of(error)

    def printed(self) -> str:
        return ""

    def close(self) -> None:
        self.alive = False


@contextmanager
def replayed_here(worker: type[HereWorker] = HereWorker) -> Iterator[None]:
    """Verifications replay cases in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "meta_path", [*sys.meta_path])  # which the process blocks imports with
        patch.setattr(replay, "VerifyWorker", worker)
        yield


def replayed(path: Path) -> int:
    """Replays the cases of an artifact as `verify` does: all agree with eager. Returns how many calls they are.

    Programs run without torch's guards: those of a method without state name the state that other methods have.
    """
    unguarded = partialmethod(torch.export.ExportedProgram.module, check_guards=False)
    with replayed_here(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.export.ExportedProgram, "module", unguarded)
        report = verify(path, VerifyOptions(against="cases"))
    assert [check.verdict.message for check in report.checks if check.failed] == []
    with PackageReader(path) as reader:
        return sum(len(case.calls) for case in reader.manifest.cases)
