"""What sessions promise, without a reference: the same calls give the same bits, whatever other sessions do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TYPE_CHECKING

from exportkit.sizes import state_bytes, state_sizes
from exportkit.verify.outcomes import SessionsAgree, SessionsDiffer, Verdict
from exportkit.verify.replayer import ReplayedTarget, ReplayEndedError, Replayer, ReplayTask
from exportkit.verify.report import Check

if TYPE_CHECKING:
    import torch

    from exportkit.verify.judging import Judge

_MOST_STATE = 256 << 20  # bytes of a session's state that are read and compared; beyond, only answers are


@dataclass
class SessionChecks:
    """Compares sessions with one that has the same calls and the process to itself.

    Attributes:
        target: The target.
        one: Calls with state.
        other: Calls with state, for a second session. They may be the same.
    """

    target: ReplayedTarget
    one: ReplayTask
    other: ReplayTask

    def checks(self) -> Iterator[Check]:
        """Yields a check for each promise."""
        promises: dict[str, Callable[[], Verdict]] = {
            "a second session": self._repeated,
            "two sessions in turns": self._interleaved,
            "fork": self._forked,
            "reset": self._reset,
            "save and load_state": self._stored,
        }
        self._repeatable, self._calls = True, 0
        for what, check in promises.items():
            self.target.progress(f"checking {what} with {self.one.label} of {self.target.name}")
            self._calls = 0
            try:
                verdict = check()
            except ReplayEndedError as ended:
                verdict = ended.verdict
            if isinstance(verdict, SessionsAgree):
                how = "equal bits" if self._repeatable else "right, in bits that the code does not repeat"
                verdict = replace(verdict, calls=self._calls, how=how)
            yield Check("sessions", what, {}, verdict, target=self.target.name, calls=self._calls)
            if check == self._repeated and not isinstance(verdict, SessionsAgree):
                return  # there is nothing to compare the others with

    def _repeated(self) -> Verdict:
        """Makes the calls twice. What the first session answers is what all others are compared with."""
        with self._replayer(self.one, "the first session") as replayer:
            self._begin = self._state_of(replayer)
            self._straight = self._finished(replayer).tensors
            # The first session stays open: a second one must not see it.
            with self._replayer(self.one, "a second session") as again:
                self._finished(again)
                difference = self._bits(self.one, self._straight, again, self._all)
                if difference is not None and self._judged(again, self._all):
                    self._repeatable, difference = False, None
        if difference is not None:
            return SessionsDiffer(f"A new session does not answer as the first one did. {difference}", "shared_state")
        self._other = self._straight
        if self.other is not self.one:
            with self._replayer(self.other, "the other calls") as replayer:
                self._other = self._finished(replayer).tensors
        return _AGREE

    def _interleaved(self) -> Verdict:
        """Makes the calls of two sessions in turns."""
        with self._replayer(self.one, "in turns") as one, self._replayer(self.other, "in turns") as other:
            for mine, his in zip_longest(self._all, range(len(self.other.case.calls))):
                if mine is not None:
                    one.call(mine)
                if his is not None:
                    other.call(his)
                self._calls += (mine is not None) + (his is not None)
            for replayer in (one, other):
                self._finished(replayer, len(replayer.task.case.calls))
            for replayer, expected in ((one, self._straight), (other, self._other)):
                calls = range(len(replayer.task.case.calls))
                if (difference := self._difference(replayer, expected, calls)) is not None:
                    return SessionsDiffer(difference, "shared_state")
        return _AGREE

    def _forked(self) -> Verdict:
        """Forks a session in the middle. The copy goes on, then its state is changed, then the session goes on."""
        with self._replayer(self.one, "before a fork") as replayer:
            replayer.run(0, self._middle)
            with replayer.fork(self.one) as copy:
                self._finished(copy, self._middle)
                if (difference := self._difference(copy, self._straight, self._tail)) is not None:
                    return SessionsDiffer(difference, "fork_without_state")
                copy.spoil()
                self._finished(replayer, self._middle)
                difference = self._difference(replayer, self._straight, self._tail)
        return _AGREE if difference is None else SessionsDiffer(difference, "fork_shares_state")

    def _reset(self) -> Verdict:
        """Resets a session that has had all calls and whose state was overwritten, and makes the calls again."""
        with self._replayer(self.one, "before a reset") as replayer:
            replayer.run()
            self._calls += len(self._all)
            replayer.spoil()
            replayer.reset()
            if (difference := self._difference_of_state(self._state_of(replayer))) is not None:
                return SessionsDiffer(difference, "reset_incomplete")
            replayer.tensors.clear()
            difference = self._difference(self._finished(replayer), self._straight, self._all)
        return _AGREE if difference is None else SessionsDiffer(difference, "reset_incomplete")

    def _stored(self) -> Verdict:
        """Saves the state in the middle, and goes on in a second session that had another state."""
        file = self.target.folder / "state-of-a-session.safetensors"
        with self._replayer(self.one, "before saving") as replayer, self._replayer(self.one, "after loading") as second:
            replayer.run(0, self._middle).store(file, load=False)
            second.spoil()
            second.store(file, load=True)
            self._finished(second, self._middle)
            difference = self._difference(second, self._straight, self._tail)
        file.unlink(missing_ok=True)
        return _AGREE if difference is None else SessionsDiffer(difference, "saved_state_differs")

    @property
    def _all(self) -> Sequence[int]:
        return range(len(self.one.case.calls))

    @property
    def _middle(self) -> int:
        return len(self.one.case.calls) // 2

    @property
    def _tail(self) -> Sequence[int]:
        return self._all[self._middle :]

    def _replayer(self, task: ReplayTask, what: str) -> Replayer:
        return self.target.replayer(task, more=what)

    def _finished(self, replayer: Replayer, start: int = 0) -> Replayer:
        """Makes the calls that are left, and reads the state."""
        replayer.run(start)
        self._calls += len(replayer.task.case.calls) - start
        return replayer.read_state() if self._reads_state else replayer

    @property
    def _reads_state(self) -> bool:
        sizes = state_sizes(self.target.manifest, self.one.case) | state_sizes(self.target.manifest, self.other.case)
        return state_bytes(self.target.manifest, sizes) <= _MOST_STATE

    def _state_of(self, replayer: Replayer) -> Mapping[str, torch.Tensor]:
        if not self._reads_state:
            return {}
        found = dict(replayer.read_state().tensors)
        return {key: tensor for key, tensor in found.items() if key.startswith("state.")}

    def _difference(self, replayer: Replayer, expected: Mapping[str, torch.Tensor], calls: Sequence[int]) -> str | None:
        difference = self._bits(replayer.task, expected, replayer, calls)
        if difference is None:
            return None
        self._repeatable = self._repeatable and self._repeats()
        return difference if self._repeatable or not self._judged(replayer, calls) else None

    def _repeats(self) -> bool:
        """Returns whether the calls alone still give the bits of the first session.

        Bits of some kernels depend on what memory holds, so that they first differ after many calls.
        """
        with self._replayer(self.one, "once more") as again:
            difference = self._bits(self.one, self._straight, self._finished(again), self._all)
            return difference is None or not self._judged(again, self._all)

    def _difference_of_state(self, state: Mapping[str, torch.Tensor]) -> str | None:
        from exportkit.verify.judging import first_difference

        return first_difference(self.target.manifest, self.one.case, self._begin, state, ())

    def _bits(
        self, task: ReplayTask, expected: Mapping[str, torch.Tensor], replayer: Replayer, calls: Sequence[int]
    ) -> str | None:
        from exportkit.verify.judging import first_difference

        return first_difference(self.target.manifest, task.case, expected, replayer.tensors, calls)

    def _judged(self, replayer: Replayer, calls: Sequence[int]) -> bool:
        """Returns whether answers are right by the verdict, for code that does not repeat its bits."""
        from safetensors.torch import load_file

        from exportkit.verify.judging import Judge

        judge: Judge = Judge(self.target.manifest, self.target.options)
        expected = load_file(replayer.task.file)
        return not judge.verdict(replayer.task, expected, replayer.tensors, replayer.structures, calls).wrong


_AGREE = SessionsAgree(0, "")
