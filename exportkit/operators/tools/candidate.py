"""Judges kernels that a program wrote, and states what was found.

Such a program may have learnt to please a check: it calls the operator that it should replace, keeps the answers to
inputs that it knows, or changes what compares them. Therefore the kernel and its judge are two processes. The judge has
the reference and not the kernel. It draws the calls, with a seed that is drawn after the kernel's files were hashed,
and compares the answers. The kernel's process has neither, and torch's dispatcher logs there what the kernel calls.

What is found is an in-toto statement: https://github.com/in-toto/attestation/blob/main/spec/v1/statement.md
"""

from __future__ import annotations

import contextlib
import datetime
import secrets
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

import exportkit
from exportkit.child.child_client import ChildClient, ChildEndedError
from exportkit.child.messages import Message
from exportkit.child.process import describe_end
from exportkit.errors import WrongResultError
from exportkit.libraries import file_sha256
from exportkit.operators.contract.findings import Finding, Severity
from exportkit.operators.tools.checking import Checked, CheckOptions, fits
from exportkit.operators.tools.source import OperatorSource
from exportkit.package.attestations import STATEMENT
from exportkit.progress import Progress

PREDICATE = "https://github.com/exportkit/exportkit/operator-check/v1"


class LoadCandidate(Message, frozen=True):
    """Asks the kernel's process to load the operators. The answer is CandidateLoaded, of `operators` or of all."""

    source: OperatorSource
    libraries: tuple[str, ...]
    operators: tuple[str, ...] = ()


class CandidateLoaded(Message, frozen=True):
    """The files that hold the kernels, and the operators' schemas by their full names."""

    files: tuple[str, ...]
    schemas: dict[str, str]


class DrawJudgedCalls(Message, frozen=True):
    """Asks the judge for calls, to be written to the folder. The answer is JudgedCalls.

    `reference` and `calls` name functions, as `path/file.py:function`. Calls are drawn from the schema too, if `drawn`.
    """

    operator: str
    schema: str
    reference: str
    calls: str | None
    options: CheckOptions
    folder: str
    drawn: bool = True


class JudgedCalls(Message, frozen=True):
    """The calls, whose tensors are in `calls.safetensors`. `why_none` says why the reference takes none."""

    calls: tuple[dict[str, Any], ...]
    why_none: str = ""


class MakeCalls(Message, frozen=True):
    """Asks the kernel's process to make the calls. The answer is CallsMade. Either they are timed, or it has a log."""

    operator: str
    calls: tuple[dict[str, Any], ...]
    folder: str
    timed: bool = False


class CallsMade(Message, frozen=True):
    """What the kernel did; its answers are in `answers.safetensors`.

    By the calls' numbers: what it refused them with. `dispatched` are the operators that torch's dispatcher was asked
    for, but for itself; `milliseconds` those of the calls that it did not refuse.
    """

    refused: dict[str, str]
    dispatched: tuple[str, ...] = ()
    milliseconds: tuple[float, ...] = ()


class JudgeAnswers(Message, frozen=True):
    """Asks the judge to compare the answers, and to time the reference in the ways `against`: "eager", "compile"."""

    dispatched: tuple[str, ...]
    against: tuple[str, ...] = ()


class ReferenceTimes(Message, frozen=True):
    """The milliseconds of the reference in one call, by the way it ran, with the call's sizes and its bytes."""

    sizes: str
    dtype: str
    moved_bytes: int
    milliseconds: dict[str, float]


class Judged(Message, frozen=True):
    """What the judge found, with the number of answers that it compared."""

    findings: tuple[Finding, ...]
    compared: int
    timed: tuple[ReferenceTimes, ...] = ()


@dataclass(frozen=True)
class KernelTrial:
    """What came of a kernel before its judge. Of its calls, it refused those whose answers were not compared."""

    calls: int
    compared: int
    dispatched: tuple[str, ...]
    findings: tuple[Finding, ...]


def drawn_seed() -> int:
    """Draws a seed that nobody could know before."""
    return secrets.randbits(31)


@contextlib.contextmanager
def two_processes() -> Iterator[tuple[str, ChildClient, ChildClient]]:
    """Starts the judge's process and the kernel's, with a folder for their files.

    Raises:
        WrongResultError: The judge's process ended. The caller handles the end of the kernel's process.
    """
    with (
        tempfile.TemporaryDirectory(prefix="exportkit-judge-") as folder,
        ChildClient("exportkit.operators.tools.judge_worker", search_path="caller") as judge,
        ChildClient("exportkit.operators.tools.candidate_worker", search_path="caller") as kernel,
    ):
        try:
            yield folder, judge, kernel
        except ChildEndedError as error:
            how = describe_end(error.status)
            raise WrongResultError(
                f"the process of the reference {how}", hint="Call the reference alone, with the same arguments."
            ) from error


def loaded(source: OperatorSource, options: CheckOptions, operators: Sequence[str] = ()) -> CandidateLoaded:
    """Loads the kernels in a process of its own. Raises the errors of loading them, and UsageError for a wrong name."""
    with ChildClient("exportkit.operators.tools.candidate_worker", search_path="caller") as child:
        try:
            return child.result(LoadCandidate(source, options.libraries, tuple(operators)), CandidateLoaded)
        except ChildEndedError as error:
            raise child.load_error(source.name, error) from error


def given_for(operator: str, given: Mapping[str, str]) -> str | None:
    """Returns what the user gave for an operator."""
    return next((text for name, text in given.items() if fits(operator, name)), None)


def judged(
    source: OperatorSource, options: CheckOptions, found: Sequence[Checked], progress: Progress
) -> tuple[list[Checked], dict[str, KernelTrial]]:
    """Holds the answers of kernels that have a reference against it, in two processes.

    Returns the same reports with what the judge found, and the trials by operator.
    """
    checked, trials = [], {}
    for each in found:
        operator = each.report.operator
        progress(f"judging {operator}")
        trials[operator] = _judge(source, options, each)
        findings = (*each.report.findings, *trials[operator].findings)
        checked.append(replace(each, report=replace(each.report, findings=findings)))
    return checked, trials


def _judge(source: OperatorSource, options: CheckOptions, checked: Checked) -> KernelTrial:
    operator, reference = checked.report.operator, given_for(checked.report.operator, options.references)
    assert reference is not None
    with two_processes() as (folder, judge, kernel):
        more = given_for(operator, options.calls)
        draw = DrawJudgedCalls(operator, checked.report.schema, reference, more, options, folder)
        drawn = judge.result(draw, JudgedCalls)
        calls = drawn.calls
        if not calls:
            message = f"The reference refuses every call, so nothing was compared: {drawn.why_none}."
            return KernelTrial(0, 0, (), (_wrong(message, parameters_of(draw.schema)),))
        try:
            kernel.result(LoadCandidate(source, options.libraries), CandidateLoaded)
            seconds = float(options.timeout * len(calls))
            made = kernel.result(MakeCalls(operator, calls, folder), CallsMade, timeout=seconds)
        except (ChildEndedError, TimeoutError) as error:
            finding = _wrong(how_it_ended(error), "Without --candidate, the checks name the call.")
            return KernelTrial(len(calls), 0, (), (finding,))
        answer = judge.result(JudgeAnswers(made.dispatched), Judged)
        findings = answer.findings
        if not answer.compared and not findings:
            message = f"The kernel refuses each call that the reference takes: {next(iter(made.refused.values()))}."
            findings = (_wrong(message, "Give calls that both take: --calls."),)
        return KernelTrial(len(calls), answer.compared, made.dispatched, findings)


def how_it_ended(error: ChildEndedError | TimeoutError) -> str:
    """Says how the process of a kernel ended."""
    how = describe_end(error.status) if isinstance(error, ChildEndedError) else "did not answer in time"
    return f"The process of the kernel {how}."


def parameters_of(schema: str) -> str:
    """Advises on a reference that refuses calls of an operator."""
    return f"The reference must take what the kernel takes, with the parameters of {schema}."


def _wrong(message: str, hint: str) -> Finding:
    return Finding("judged-values", Severity.broken, message, hint=hint)


def statement(
    digests: Mapping[str, str],
    options: CheckOptions,
    found: Sequence[Checked],
    trials: Mapping[str, KernelTrial],
    *,
    drawn: bool,
) -> dict[str, Any]:
    """Returns the in-toto statement about kernels, whose files have these digests by name.

    `drawn` is whether the seed was drawn after the files were hashed.
    """
    operators = []
    for each in found:
        trial, name = trials[each.report.operator], each.report.operator
        reference = Path((given_for(name, options.references) or "").rpartition(":")[0])
        operators.append(
            {
                "operator": name,
                "schema": each.report.schema,
                "passed": list(each.report.passed),
                "findings": [msgspec.to_builtins(finding) for finding in each.report.findings],
                "not_checked": each.not_checked,
                "never_tried": list(each.never_tried),
                "reference_sha256": file_sha256(reference) if reference.is_file() else None,  # not of a module
                "judged": {"calls": trial.calls, "compared": trial.compared, "dispatched": list(trial.dispatched)},
            }
        )
    return {
        "_type": STATEMENT,
        "subject": [{"name": name, "digest": {"sha256": digest}} for name, digest in digests.items()],
        "predicateType": PREDICATE,
        "predicate": {
            "ok": not any(each.broken or each.not_checked for each in found),
            "exportkit": exportkit.__version__,
            "torch": version("torch"),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "seed": options.seed,
            "seed_drawn_after_build": drawn,
            "operators": operators,
        },
    }
