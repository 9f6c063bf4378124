"""Replays sequences of calls in the replay process, each in a session of its own."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from exportkit.package.manifest import Accuracy, Case, Manifest
from exportkit.progress import Progress
from exportkit.sizes import has_state, state_sizes
from exportkit.verify.commands import CallModel, ModelCalled, SessionReady, UseSession
from exportkit.verify.filled_memory import Content
from exportkit.verify.options import VerifyOptions
from exportkit.verify.outcomes import CallFailed, Verdict
from exportkit.verify.replay import ReplayProcess

if TYPE_CHECKING:
    import torch


class ReplayEndedError(Exception):
    """The process could not do what it was told. The verdict says why."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.message)
        self.verdict = verdict


@dataclass(frozen=True)
class ReplayTask:
    """Calls to make one after another.

    Attributes:
        label: The name of the whole, such as "case 0 (batch=2)".
        case: The calls: a recorded case, or one that eager has drawn.
        file: A safetensors file with the tensors of the case.
        layouts: By method, the layout of each input in memory.
        memory: What memory is filled with before each call.
        moves: How far eager moves when it rounds otherwise, by the name of a result's tensor.
    """

    label: str
    case: Case
    file: Path
    layouts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    memory: Content = ""
    moves: Mapping[str, Accuracy] = field(default_factory=dict)

    def call_name(self, number: int) -> str:
        """Returns such as "call 3 (decode)"; "the call" if there is only one."""
        calls = self.case.calls
        return f"call {number} ({calls[number].method})" if len(calls) > 1 else "the call"


@dataclass(frozen=True)
class ReplayedTarget:
    """A target that the replay process has loaded.

    Attributes:
        name: The target's name.
        process: The process that runs it.
        manifest: The package's manifest.
        options: The verification's options.
        folder: A private directory for tensors.
        progress: Called with each step before it starts.
    """

    name: str
    process: ReplayProcess
    manifest: Manifest
    options: VerifyOptions
    folder: Path
    progress: Progress

    def replayer(self, task: ReplayTask, *, doing: str = "running", more: str = "") -> Replayer:
        """Returns what makes the calls of a task. Messages are such as "running case 0 of cpu, in turns"."""
        said = f"{doing} {task.label} of {self.name}{more and f', {more}'}"
        return Replayer(task, self.process, self.manifest, self.folder, doing=said)


class Replayer:
    """The calls of a task, in a session of the replay process if they have state, and the answers so far.

    Every method raises ReplayEndedError if the process does not do it.

    Attributes:
        tensors: The answers, as a case names them: `<call>.output.<i>`, `<call>.written.<i>` and `state.<j>`.
        structures: By call, the structure of its result, as JSON.
        seconds: The time of all calls.
    """

    _numbers = itertools.count()

    def __init__(
        self,
        task: ReplayTask,
        replay: ReplayProcess,
        manifest: Manifest,
        folder: Path,
        *,
        doing: str,
        session: int = -1,
    ) -> None:
        """Opens a session, if the task needs one and none is given. `doing` is for messages."""
        self.task = task
        self.tensors: dict[str, torch.Tensor] = {}
        self.structures: dict[int, str] = {}
        self.seconds = 0.0
        self._replay, self._manifest, self._folder, self._doing = replay, manifest, folder, doing
        self._session = session if session >= 0 else None
        if self._session is None and has_state(manifest, task.case):
            number = next(self._numbers)
            self._use(UseSession("open", number, sizes=state_sizes(manifest, task.case)), "opening a session")
            self._session = number

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        # A process that has ended is not started again for this.
        alive = error is None or (isinstance(error, ReplayEndedError) and isinstance(error.verdict, CallFailed))
        if self._session is not None and alive:
            self._replay.use(UseSession("close", self._session), doing=self._doing)
            self._session = None

    def call(self, number: int) -> None:
        """Makes one call of the task."""
        from safetensors.torch import load_file

        outputs = self._folder / f"answer-{next(self._numbers)}.safetensors"
        several = len(self.task.case.calls) > 1
        name = self.task.call_name(number)
        method = self.task.case.calls[number].method
        command = CallModel(
            inputs=str(self.task.file),
            outputs=str(outputs),
            number=number,
            method=method,
            session=self._session,
            layouts=self.task.layouts.get(method, ()),
            memory=self.task.memory,
        )
        answer = self._replay.call(command, doing=f"{self._doing}, {name}" if several else self._doing)
        if isinstance(answer, CallFailed) and several:
            answer = CallFailed(answer.error, answer.detail, name)
        if not isinstance(answer, ModelCalled):
            raise ReplayEndedError(answer)
        self.tensors |= load_file(outputs)
        self.structures[number] = answer.structure
        self.seconds += answer.seconds
        outputs.unlink()

    def run(self, start: int = 0, stop: int | None = None) -> Self:
        """Makes the calls of the task from one to before another."""
        for number in range(len(self.task.case.calls))[start:stop]:
            self.call(number)
        return self

    def read_state(self) -> Self:
        """Reads the state of the session, if there is one."""
        from safetensors.torch import load_file

        if self._session is not None:
            file = self._folder / f"state-{next(self._numbers)}.safetensors"
            self._use(UseSession("read", self._session, file=str(file)), "reading the state")
            self.tensors |= load_file(file)
            file.unlink()
        return self

    def fork(self, task: ReplayTask) -> Replayer:
        """Forks the session, for calls of the same or another task."""
        copy = next(self._numbers)
        self._use(UseSession("fork", self._number, copy), "forking the session")
        return Replayer(task, self._replay, self._manifest, self._folder, doing=self._doing, session=copy)

    def reset(self) -> None:
        """Resets the session."""
        self._use(UseSession("reset", self._number), "resetting the session")

    def store(self, file: Path, *, load: bool) -> None:
        """Saves the session's state to a file, or loads it from one."""
        doing = "loading a saved state" if load else "saving the state"
        self._use(UseSession("load" if load else "save", self._number, file=str(file)), doing)

    def spoil(self) -> None:
        """Overwrites the state."""
        self._use(UseSession("spoil", self._number), "overwriting the state")

    @property
    def _number(self) -> int:
        assert self._session is not None
        return self._session

    def _use(self, command: UseSession, doing: str) -> None:
        answer = self._replay.use(command, doing=f"{doing}, {self._doing}")
        if isinstance(answer, CallFailed):
            answer = CallFailed(answer.error, answer.detail, doing)
        if not isinstance(answer, SessionReady):
            raise ReplayEndedError(answer)
