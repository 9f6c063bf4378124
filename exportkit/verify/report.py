"""What a verification found, check by check. Nothing here prints, and nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from exportkit.verify.outcomes import Verdict


@dataclass(frozen=True)
class Check:
    """One thing that was checked.

    Attributes:
        against: "package" for loading it, "cases" for a recorded case, "eager" for a comparison with the eager model.
        label: Which one, such as "case 0" or "batch=64, gh=8, gw=8".
        sizes: The dimensions of the call, by name.
        verdict: What was found.
        seconds: What the packaged model took, first call and input checks included; None where it was not called.
        target: The target that was checked, "program" for an exported program; None where it is about all of them.
    """

    against: Literal["package", "cases", "eager"]
    label: str
    sizes: Mapping[str, int]
    verdict: Verdict
    seconds: float | None = None
    target: str | None = None

    @property
    def failed(self) -> bool:
        """Whether this check makes the verification fail."""
        return self.verdict.exit_code != 0


@dataclass(frozen=True)
class TargetReport:
    """What became of a target of the artifact, or of its exported program.

    Attributes:
        name: "program" for an exported program.
        device: Such as "cpu" or "cuda:0"; None where it was not run.
        load_seconds: exportkit.load in the fresh process, torch already imported; None where it was not loaded.
        left_out: Why it was not run; None where it was.
    """

    name: str
    device: str | None = None
    load_seconds: float | None = None
    left_out: str | None = None


@dataclass(frozen=True)
class Report:
    """All that a verification found.

    Attributes:
        artifact: The file that was verified.
        torch: Version of the torch that ran it, None if nothing was loaded.
        targets: Each target, those that were run first, the best first.
        checks: In the order they were made.
        skipped: What was left out of the comparison with eager, and why.
    """

    artifact: str
    torch: str | None
    targets: tuple[TargetReport, ...]
    checks: tuple[Check, ...]
    skipped: tuple[str, ...] = ()

    @property
    def failure(self) -> Check | None:
        """The first check that failed."""
        return next((check for check in self.checks if check.failed), None)

    @property
    def exit_code(self) -> int:
        """That of the first check that failed, else 0."""
        return self.failure.verdict.exit_code if self.failure else 0
