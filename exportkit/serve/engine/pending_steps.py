"""A step of a sequence that waits for its turn or runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from exportkit.serve.engine.checked_request import CheckedRequest
from exportkit.serve.engine.execution import BatchResult
from exportkit.serve.engine.home import Home
from exportkit.serve.engine.queued_request import Answered
from exportkit.serve.engine.steps import HeldSession, StepRequest
from exportkit.serve.sequences.table import OpenSequence, Reason
from exportkit.serve.statuses import ServeError


class StepOwner(Protocol):
    """The sequences of a package."""

    def ended_by(self, pending: PendingStep, reason: Reason, /) -> None:
        """A step is given up."""

    def answered(self, pending: PendingStep, outcome: BatchResult | ServeError, /) -> None:
        """A step has its answer."""


@dataclass(eq=False)
class SequencePlace:
    """Where a sequence runs: on which copy of which load, in which session."""

    home: Home
    copy: int
    held: HeldSession


Run = Callable[[StepRequest, int, float | None, Answered], Callable[[], None]]
"""Runs a step on one of a load's copies, within so many seconds. Returns how to take it out of the queue."""


class PendingStep:
    """A step that waits for its turn or runs.

    Attributes:
        over: Whether it had its answer, or was given up.
    """

    __slots__ = ("_owner", "answered", "deadline", "give_up_run", "over", "request", "run", "sequence", "timer")

    def __init__(
        self, owner: StepOwner, sequence: OneSequence, request: CheckedRequest, run: Run, answered: Answered
    ) -> None:
        self._owner = owner
        self.sequence = sequence
        self.request = request
        self.run = run
        self.answered = answered
        self.over = False
        self.deadline: float | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.give_up_run: Callable[[], None] | None = None

    def give_up(self) -> None:
        """Ends the sequence: nobody waits for this step's answer any more, and it may have changed the state."""
        self._owner.ended_by(self, "unanswered")

    def __call__(self, outcome: BatchResult | ServeError) -> None:
        """Gets the answer."""
        self._owner.answered(self, outcome)


OneSequence = OpenSequence[SequencePlace, PendingStep]
