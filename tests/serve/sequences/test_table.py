"""The table does what a list of all sequences and their steps does, whatever is asked in whatever order."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from exportkit.serve.sequences import table as module
from exportkit.serve.sequences.table import (
    NoSequenceError,
    OpenSequence,
    SequenceLimits,
    SequencesFullError,
    SequenceTable,
)
from tests.drawn import examples

KEYS = st.tuples(st.sampled_from(["", "a", "b"]), st.integers(0, 2))


@dataclass
class Naive:
    """A sequence, by all of its steps: those that were answered, and those that are not."""

    real: OpenSequence[str, int]
    key: tuple[str, int]
    size: int
    rested: float
    steps: list[int] = field(default_factory=list)  # not answered, in order
    takes: bool = True  # further steps
    then: str | None = None  # why it ends after its steps
    ended: str | None = None


class SameAsALog(RuleBasedStateMachine):
    @initialize(most=st.integers(1, 4), most_bytes=st.integers(10, 60), idle=st.integers(1, 20))
    def prepare(self, most: int, most_bytes: int, idle: int) -> None:
        self.limits = SequenceLimits(most, most_bytes, float(idle))
        self.table: SequenceTable[str, int] = SequenceTable(self.limits)
        self.log: list[Naive] = []
        self.told: list[OpenSequence[str, int]] = []
        self.now = 0.0
        self.number = 0

    def live(self) -> list[Naive]:
        return [each for each in self.log if each.ended is None]

    def full(self, there: list[Naive], size: int) -> bool:
        """Whether one more of this size is too many, or too large."""
        held = sum(each.size for each in there)
        return len(there) >= self.limits.most or held + size > self.limits.most_bytes

    def taking(self, key: tuple[str, int]) -> Naive | None:
        return next((each for each in self.live() if each.key == key and each.takes), None)

    @rule(key=KEYS, size=st.integers(0, 30), last=st.booleans())
    def begin(self, key: tuple[str, int], size: int, last: bool) -> None:
        old = self.taking(key)
        stay = [each for each in self.live() if each is not old or each.steps]
        if self.full(stay, size):
            with pytest.raises(SequencesFullError):
                self.table.begin(key, "payload", size, self.now)
            return
        real = self.table.begin(key, "payload", size, self.now)
        if old is not None:
            old.takes, old.then = False, "restarted"
            if not old.steps:
                old.ended = "restarted"
        self.log.append(Naive(real, key, size, self.now))
        self.step(key, last)

    @rule(key=KEYS, last=st.booleans())
    def step(self, key: tuple[str, int], last: bool) -> None:
        found = self.taking(key)
        if found is None:
            with pytest.raises(NoSequenceError) as error:
                self.table.find(key)
            before = [each for each in self.log if each.key == key]
            assert (error.value.reason is None) == (not before)
            return
        assert self.table.find(key) is found.real
        self.number += 1
        assert self.table.submit(found.real, self.number, last=last) == (not found.steps)
        found.steps.append(self.number)
        if last:
            found.takes, found.then = False, "end"
            with pytest.raises(ValueError, match="no more steps"):
                self.table.submit(found.real, 0, last=False)

    @precondition(lambda self: any(each.steps for each in self.live()))
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        found = data.draw(st.sampled_from([each for each in self.live() if each.steps]))
        assert list(found.real.steps) == found.steps
        found.steps.pop(0)
        following = self.table.answered(found.real, self.now)
        assert following == (found.steps[0] if found.steps else None)
        if not found.steps:
            found.idle_since = self.now
            found.ended = found.then

    @precondition(lambda self: self.log)
    @rule(data=st.data(), reason=st.sampled_from(["failed", "unanswered", "lost", "unloaded"]))
    def end(self, data: st.DataObject, reason: module.Reason) -> None:
        found = data.draw(st.sampled_from(self.log))
        waited = found.steps[1:] if found.ended is None else []
        assert self.table.end(found.real, reason) == waited
        if found.ended is None:
            found.ended, found.takes, found.steps = reason, False, []
        assert self.table.answered(found.real, self.now) is None

    @rule(seconds=st.integers(0, 15))
    def wait(self, seconds: int) -> None:
        self.now += seconds
        self.table.end_idle(self.now)
        for each in self.live():
            if not each.steps and self.now - each.idle_since >= self.limits.idle_seconds:
                each.ended, each.takes = "idle", False

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "log"):
            return
        live = self.live()
        assert [each.real for each in live] == list(self.table)
        assert self.table.count == len(live) <= self.limits.most
        assert self.table.size == sum(each.size for each in live) <= self.limits.most_bytes
        assert self.table.ended == Counter(each.ended for each in self.log if each.ended is not None)
        self.told += self.table.take_ended()
        assert {id(each) for each in self.told} == {id(each.real) for each in self.log if each.ended is not None}
        assert len(self.told) == sum(self.table.ended.values())
        assert all(each.real.ended == each.ended for each in self.log)
        assert all(list(each.real.steps) == each.steps for each in live)


MANY = settings(max_examples=examples(200), stateful_step_count=60, deadline=None, database=None)
SameAsALog.TestCase.settings = MANY
TestSameAsALog = SameAsALog.TestCase


def test_it_is_known_why_the_sequences_that_ended_last_did():
    table: SequenceTable[None, int] = SequenceTable(SequenceLimits())
    for key in range(module.REMEMBERED + 1):
        table.end(table.begin(key, None, 0, 0.0), "failed")
    for key, reason in ((0, None), (1, "failed"), (module.REMEMBERED, "failed")):
        with pytest.raises(NoSequenceError) as error:
            table.find(key)
        assert error.value.reason == reason
    table.submit(table.begin(1, None, 0, 0.0), 1, last=True)
    with pytest.raises(NoSequenceError) as error:
        table.find(1)
    assert error.value.reason == "end"
