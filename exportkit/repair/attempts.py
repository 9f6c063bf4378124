"""What a repair tried, and what came of it. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from exportkit.package.compiled_with import GivenOptions
from exportkit.package.manifest import Manifest


@dataclass(frozen=True)
class Attempt:
    """Options that were tried.

    Attributes:
        what: What they do.
        options: They, as arguments of `exportkit export`.
        on: What was compiled with them, such as "3 nodes" or "the model".
        result: What came of it, in one line.
        right: Whether the code was right.
        seconds: The time that it took.
    """

    what: str
    options: str
    on: str
    result: str
    right: bool
    seconds: float

    def __str__(self) -> str:
        """One line."""
        return f"{self.what}, {self.on}: {self.result} ({self.seconds:.0f} s)"


@dataclass(frozen=True)
class Costs:
    """Milliseconds of the example's calls, timed in turns. There is no unrepaired code if it did not compile."""

    repaired: float
    unrepaired: float | None
    eager: float

    def __str__(self) -> str:
        """One line."""
        unrepaired = f"unrepaired {self.unrepaired:.3g} ms, " if self.unrepaired is not None else ""
        return f"{self.repaired:.3g} ms a call; {unrepaired}eager {self.eager:.3g} ms (at the example's sizes)"


@dataclass(frozen=True)
class Repaired:
    """An artifact that was verified.

    Attributes:
        manifest: Its manifest.
        given: The options that make it right; none if it was right without.
        problem: What was wrong without them, in lines; empty if nothing was.
        attempts: What was tried.
        costs: What the options cost; None if none are needed.
    """

    manifest: Manifest
    given: GivenOptions = GivenOptions()
    problem: str = ""
    attempts: Sequence[Attempt] = ()
    costs: Costs | None = None

    def document(self) -> dict[str, Any]:
        """Returns the repair as JSON."""
        return {
            "problem": self.problem,
            "options": {**self.given.inductor_config, **dict.fromkeys(self.given.eager_kernels, "eager")},
            "arguments": self.given.arguments,
            "attempts": [vars(attempt) for attempt in self.attempts],
            "milliseconds": vars(self.costs) if self.costs else None,
        }


def tried_lines(attempts: Sequence[Attempt]) -> list[str]:
    """Returns a line for each attempt."""
    return [f"tried {attempt}" for attempt in attempts] or ["nothing could be tried"]
