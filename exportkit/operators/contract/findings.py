"""What a check finds, as values that other processes can be sent."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Severity(StrEnum):
    """How bad a finding is."""

    broken = "broken"
    """The operator gives wrong answers, or breaks export, training or the process."""
    doubtful = "doubtful"
    """The operator may be right, but something that others rely on does not hold, such as equal answers in a batch."""


class Finding(msgspec.Struct, frozen=True):
    """A promise that does not hold.

    Attributes:
        check: The check's name, such as "fake-shape".
        severity: How bad it is.
        message: What was promised and what was seen, in a sentence.
        call: The smallest call that shows it, as Python code that a reader can run.
        hint: What to change.
    """

    check: str
    severity: Severity
    message: str
    call: str | None = None
    hint: str | None = None

    @property
    def text(self) -> str:
        """All of it, for a reader."""
        call = None if self.call is None else "\n".join(f"    >>> {line}" for line in self.call.splitlines())
        return "\n".join(filter(None, (f"{self.check}: {self.message}", call, self.hint and f"    {self.hint}")))


class OperatorReport(msgspec.Struct, frozen=True):
    """All that was checked on an operator.

    Attributes:
        operator: `namespace::name`.
        schema: Its schema.
        passed: Names of the checks that found nothing.
        skipped: Names of the checks that did not apply or could not run, with the reason.
        findings: What the others found.
        calls: How many calls were tried.
    """

    operator: str
    schema: str
    passed: tuple[str, ...]
    skipped: dict[str, str]
    findings: tuple[Finding, ...]
    calls: int
