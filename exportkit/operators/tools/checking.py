"""Holds the operators of a library or of a model to the contract, in child processes.

A kernel may end the process, never return, or take all of the memory: that is a finding, with the call that did it.
The other checks and the other operators go on in a fresh process.
"""

from __future__ import annotations

import contextlib
import fnmatch
import signal
import tempfile
import time
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec
from msgspec.structs import replace

from exportkit.child.child_client import ChildClient, ChildEndedError
from exportkit.child.messages import Message
from exportkit.child.process import describe_end
from exportkit.errors import NotAnOperatorLibraryError, UsageError
from exportkit.operators.contract.findings import Finding, OperatorReport, Severity
from exportkit.operators.tools.journal import Step, read_step
from exportkit.operators.tools.source import OperatorSource
from exportkit.progress import Progress

_MOST_ENDS = 8  # processes that an operator may end before the rest of its checks is left out
_VARIED_ENDS = 4  # of these, before its calls are no longer varied
MOST_SEARCH_ENDS = 2  # of these, while its calls are drawn

SEARCH = "search"
"""The step in which calls are drawn and varied."""


class CheckOptions(Message, frozen=True):
    """How operators are checked: as `exportkit ops check --help` says.

    `references`, `calls`: functions by operator, such as `path/file.py:function`. `memory`: bytes that the process may
    allocate; None: half of what is free.
    """

    operators: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    references: dict[str, str] = msgspec.field(default_factory=dict)
    calls: dict[str, str] = msgspec.field(default_factory=dict)
    specs: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    device: str = "auto"
    dtypes: tuple[str, ...] = ("float32", "float64", "float16", "bfloat16")
    seed: int = 0
    most_calls: int = 24
    timeout: int = 60
    memory: int | None = None


class Prepare(Message, frozen=True):
    """Asks the child to load operators. The answer is Prepared."""

    source: OperatorSource
    options: CheckOptions
    journal: str


class Prepared(Message, frozen=True):
    """The schemas of the operators that can be checked, by their names, sorted."""

    schemas: dict[str, str]


class CheckOne(Message, frozen=True):
    """Asks the child to check an operator. The answer is Checked.

    What ended the process before is left out: the checks `without`, and the calls to `avoid` while calls are drawn or
    varied, as code. `varied`: whether the calls of a model or a user are varied.
    """

    operator: str
    without: tuple[str, ...] = ()
    avoid: tuple[str, ...] = ()
    varied: bool = True


Origin = Literal["SPEC", "given", "model", "drawn"]


class Checked(Message, frozen=True):
    """What came of checking an operator.

    `origin` is where the calls come from, such as "drawn and given". `not_checked` says why no check could run, and
    `hint` what to do about that; `never_tried`, what no call tried.
    """

    report: OperatorReport
    origin: str
    not_checked: str | None = None
    hint: str | None = None
    never_tried: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def broken(self) -> bool:
        """Whether the operator breaks the contract."""
        return any(finding.severity is Severity.broken for finding in self.report.findings)


def check_source(source: OperatorSource, options: CheckOptions, progress: Progress) -> Generator[Checked, None, None]:
    """Checks the operators of a library or of a model, and yields what came of each as soon as it is known.

    Raises:
        UsageError: Something in the source or in the options cannot be found.
        LibraryLoadError: The library cannot be loaded, or ends the process that loads it.
        ExportError: Importing it raised an error, or the model did.
        HostError: No child process can be started.
    """
    with tempfile.TemporaryDirectory(prefix="exportkit-check-") as folder, contextlib.ExitStack() as stack:
        worker = _Worker(source, options, Path(folder, "journal"))
        stack.callback(worker.stop)
        progress(f"loading {source.name}")
        names = worker.start()
        if not names:
            verb = "calls no custom" if source.kind == "model" else "registers no"
            raise NotAnOperatorLibraryError(f"{source.text} {verb} operators")
        for number, name in enumerate(names, 1):
            began = time.monotonic()
            progress(f"checking {name} ({number} of {len(names)})")
            yield replace(_check(worker, name), seconds=round(time.monotonic() - began, 1))


class _Worker:
    """The child process. A new one takes the place of one that ended."""

    def __init__(self, source: OperatorSource, options: CheckOptions, journal: Path) -> None:
        self._prepare = Prepare(source, options, str(journal))
        self.options = options
        self.journal = journal
        self._child: ChildClient | None = None
        self.fresh = False
        self.schemas: dict[str, str] = {}

    def start(self) -> tuple[str, ...]:
        """Starts a process that has loaded the operators. Returns their names."""
        self.stop()
        self._child = ChildClient("exportkit.operators.tools.check_worker", search_path="caller")
        try:
            self.schemas = self._child.result(self._prepare, Prepared).schemas
        except ChildEndedError as error:
            raise self._child.load_error(self._prepare.source.name, error) from error
        self.fresh = True
        return tuple(self.schemas)

    def ask(self, command: CheckOne) -> Checked:
        """Checks an operator. Raises ChildEndedError if the process ended meanwhile."""
        if self._child is None:
            self.start()
        assert self._child is not None
        try:
            return self._child.result(command, Checked)
        except ChildEndedError:
            self.stop()
            raise
        finally:
            self.fresh = False

    def stop(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None


@dataclass
class _Ends:
    count: int = 0
    findings: list[Finding] = field(default_factory=list)
    without: list[str] = field(default_factory=list)
    avoid: list[str] = field(default_factory=list)

    def add(self, status: int, step: Step | None, timeout: int) -> None:
        self.count += 1
        finding = _finding(status, step, timeout)
        if step is not None and step.check == SEARCH and step.given is not None:
            self.avoid.append(step.given)
        else:
            self.without.append(step.check if step else SEARCH)
        if finding.check not in {each.check for each in self.findings}:
            self.findings.append(finding)


def _check(worker: _Worker, name: str) -> Checked:
    ends = _Ends()
    while True:
        if ends.count >= _MOST_ENDS or SEARCH in ends.without:
            report = OperatorReport(name, worker.schemas[name], (), {}, tuple(ends.findings), 0)
            return Checked(report, "none", "it ended every process in which it was called")
        fresh = worker.fresh
        try:
            varied = ends.count < _VARIED_ENDS
            checked = worker.ask(CheckOne(name, tuple(ends.without), tuple(ends.avoid), varied))
        except ChildEndedError as error:
            # Another operator may have damaged the process before. Only what ends a fresh one is to blame.
            if fresh:
                ends.add(error.status, read_step(worker.journal), worker.options.timeout)
            worker.start()
            continue
        if ends.findings:
            worker.stop()  # it may have been damaged, but not ended, this time
        report = checked.report
        skipped = {**report.skipped, **dict.fromkeys(ends.without, "it ended the process")}
        report = replace(report, skipped=skipped, findings=(*ends.findings, *report.findings))
        return replace(checked, report=report)


def _finding(status: int, step: Step | None, timeout: int) -> Finding:
    during = "while calls were drawn" if step is None or step.check == SEARCH else f"in the check {step.check}"
    if step and step.fault:
        check, message = "gpu-fault", f"The call ended the GPU's context {during}: {step.fault}."
        hint = "compute-sanitizer names the line of the kernel. Check each size, stride and index before they are read."
    elif status == -signal.SIGALRM:
        check, message = "hang", f"The call did not return within {timeout} s, {during}."
        hint = "If it only needs longer, give more seconds with --timeout."
    else:
        check, message = "crash", f"The process {describe_end(status)} {during}."
        hint = "Check every argument in the kernel, and refuse with an exception what it cannot compute. If the call "
        hint += "alone does not end a process, one before it may have written beyond its memory."
    return Finding(check, Severity.broken, message, step.call if step else None, hint)


def fits(operator: str, name: str) -> bool:
    """Whether a name or a pattern that the user gave, which may leave out the namespace, is an operator's."""
    return any(fnmatch.fnmatchcase(form, name) for form in (operator, operator.partition("::")[2]))


def chosen(operators: Sequence[str], wanted: Sequence[str]) -> tuple[str, ...]:
    """Returns the operators that the user named, or all. Raises UsageError if a name fits none of them."""
    found = []
    for each in wanted:
        matching = [operator for operator in operators if fits(operator, each)]
        if not matching:
            raise UsageError(f"there is no operator {each!r}", hint=f"There are: {', '.join(operators) or 'none'}.")
        found += matching
    return tuple(dict.fromkeys(found)) if wanted else tuple(operators)


def exit_code(found: Iterable[Checked]) -> int:
    """Returns 1 if an operator breaks the contract or could not be checked, or 0."""
    return int(any(checked.broken or checked.not_checked is not None for checked in found))
