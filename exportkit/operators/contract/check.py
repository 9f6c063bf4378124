"""Holds an operator to the contract."""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from exportkit.errors import UsageError
from exportkit.operators.contract.call_code import WrittenCall, ways_to_write
from exportkit.operators.contract.check_fakes import fake_answer
from exportkit.operators.contract.definition import ContractCheck, Problem, checks
from exportkit.operators.contract.findings import Finding, OperatorReport
from exportkit.operators.contract.operator_spec import OpSpec
from exportkit.operators.contract.operator_trial import NotApplicable, Subject, Trial, first_line, is_out_of_memory
from exportkit.operators.contract.resizing import neighbours, smaller
from exportkit.operators.contract.sample import Sample, tensors, upcast
from exportkit.schema_text import schema_text

Progress = Callable[[str, Sample | None], None]
"""Told the check and the call before it is tried, or None for a check of the operator as a whole."""

_SMALLER = 200
"""How many calls are tried while the smallest one is looked for."""

_FEW = 2
"""How many calls are tried in a dtype that is not the first, where a check tries only some."""

_FEW_ELEMENTS = 100
"""Elements of a call that is tried in float64, though nobody gave it so."""

_NEIGHBOURS_OF = 3
"""How many of the calls are tried at other sizes."""


def check_operator(subject: Subject, only: Sequence[str] = (), progress: Progress | None = None) -> OperatorReport:
    """Runs the checks on an operator, in this process.

    A kernel may crash the process: `exportkit ops check` calls this in a child process.

    Args:
        subject: The operator and the calls to try.
        only: The checks to run, by name. Empty: all.
        progress: Told what comes next, so that a process that dies leaves word of it.

    Returns:
        What each check found. A finding has the smallest of the calls that shows it.

    Raises:
        UsageError: `only` names a check that does not exist.
    """
    known = checks()
    if unknown := [name for name in only if name not in known]:
        raise UsageError(f"there are no checks {', '.join(unknown)}", hint=f"The checks are: {', '.join(known)}.")
    trial = Trial(subject)
    passed: list[str] = []
    skipped: dict[str, str] = {}
    findings: list[Finding] = []
    for check in known.values():
        if only and check.name not in only:
            continue
        if seen := sorted({finding.check for finding in findings} & set(check.unless)):
            skipped[check.name] = f"{seen[0]} found a reason for it to fail"
            continue
        with trial.reproducible(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = _run(check, trial, progress or (lambda name, call: None))
        if isinstance(found, Finding):
            findings.append(found)
        elif isinstance(found, str):
            skipped[check.name] = found
        else:
            passed.append(check.name)
    schema = schema_text(subject.overload._schema)
    return OperatorReport(subject.name, schema, tuple(passed), skipped, tuple(findings), trial.count)


def assert_keeps(spec: OpSpec, device: torch.device) -> None:
    """Holds an operator to its SPEC, in a test.

    Args:
        spec: The operator's promises.
        device: Where its samples are called.

    Raises:
        AssertionError: A check found something. The message has every finding.
    """
    __tracebackhide__ = True  # pytest shows the findings and not this function
    report = check_operator(Subject.of_spec(spec, [device]))
    if report.findings:
        raise AssertionError("\n\n".join([f"{report.operator} on {device}", *(f.text for f in report.findings)]))


def _run(check: ContractCheck, trial: Trial, progress: Progress) -> Finding | str | None:
    """Returns what a check finds, why it does not apply, or None if all is well."""
    if check.whole:
        progress(check.name, None)
        try:
            problem = check.function(trial)
        except NotApplicable as reason:
            return str(reason)
        if problem is not None and is_out_of_memory(problem.message):
            return f"the check takes more memory than it may: {problem.message}"
        return None if problem is None else _finding(check, trial, problem, problem.call)
    reasons: list[str] = []
    tried = 0
    calls = chosen(check, trial.subject.calls)
    if check.dtypes == "float64" and trial.subject.spec is None:
        calls += _with_other_options(trial, calls)
    if check.other_sizes:
        calls += _other_calls(trial, progress)
    for call in calls:
        if tried == check.most:
            break
        progress(check.name, call)
        try:
            problem = _problem(check, trial, call)
        except NotApplicable as reason:
            reasons.append(str(reason))
            continue
        tried += 1
        if problem is not None:
            return _finding(check, trial, *_smallest(check, trial, call, problem, progress))
    if tried:
        return None
    return reasons[0] if reasons else f"no call has a {check.dtypes} dtype"


def _with_other_options(trial: Trial, calls: Sequence[Sample]) -> list[Sample]:
    """Returns small calls whose numbers and flags those in float64 do not have: in float64 if the operator takes it."""

    def form(call: Sample) -> str:
        return str([v is None if isinstance(v, Tensor) else v for v in trial.bound(call).values() if not tensors(v)])

    def wide(call: Sample) -> Sample:
        with contextlib.suppress(NotApplicable):
            trial.answer(other := upcast(call))
            return other
        return call

    seen = {form(call) for call in calls}
    given = [call for call in trial.subject.calls if 0 < call.elements <= _FEW_ELEMENTS and call.floating_dtype]
    new = {form(call): call for call in reversed(given) if form(call) not in seen}
    return [trial.remembered("wide", call, functools.partial(wide, call)) for call in new.values()]


def chosen(check: ContractCheck, calls: Sequence[Sample]) -> list[Sample]:
    """Returns the calls for a check, the smallest first and empty ones last.

    If it tries only some, these come first, evenly spread and one with the most arguments among them, and then those
    that replace calls it does not apply to.
    """
    calls_by_size = _smallest_first(calls)
    by_dtype: dict[torch.dtype | None, list[Sample]] = {}
    for call in calls_by_size:
        by_dtype.setdefault(call.floating_dtype, []).append(call)
    first = first_dtype(calls)
    allowed = {"all": None, "some": _FEW, "first": 0, "float64": 0}[check.dtypes]
    whole = (torch.float64 if check.dtypes == "float64" else first, None)
    ids = {
        id(call)
        for dtype, group in by_dtype.items()
        for call in (group if allowed is None or dtype in whole else _spread(group, allowed))
    }
    tried = [call for call in calls_by_size if id(call) in ids]
    if check.most is None:
        return tried
    first_ones = _spread(tried, check.most)
    if len(first_ones) < len(tried) and _given(fullest := max(tried, key=_given)) > max(map(_given, first_ones)):
        first_ones = [*_spread(tried, check.most - 1), fullest]
    return first_ones + [call for call in tried if not any(call is other for other in first_ones)]


def _given(call: Sample) -> int:
    """Returns how many arguments are given: optional ones may be wrong only together."""
    return sum(value is not None for value in (*call.args, *call.kwargs.values()))


def _smallest_first(calls: Sequence[Sample]) -> list[Sample]:
    return sorted(calls, key=lambda call: call.elements or math.inf)


def first_dtype(calls: Sequence[Sample]) -> torch.dtype | None:
    """Returns the dtype of the first call that has a floating one."""
    return next((call.floating_dtype for call in calls if call.floating_dtype is not None), None)


def _spread(calls: Sequence[Sample], most: int) -> list[Sample]:
    """Returns at most so many calls, evenly, the first and the last among them."""
    if len(calls) <= most:
        return list(calls)
    return [calls[index * (len(calls) - 1) // max(1, most - 1)] for index in range(most)]


def _other_calls(trial: Trial, progress: Progress) -> list[Sample]:
    """Returns calls at sizes that the subject does not list, and which the operator takes."""
    if trial.others is None:
        trial.others = []
        first = first_dtype(trial.subject.calls)
        near = [call for call in trial.subject.calls if call.elements and call.floating_dtype in (first, None)]
        for call in _spread(sorted(near, key=lambda call: call.elements)[: len(near) // 2 + 1], _NEIGHBOURS_OF):
            for other in neighbours(trial.subject, call):
                progress("runs", other)
                with contextlib.suppress(Exception):  # the operator may refuse it
                    fake_answer(trial, other)
                    trial.answer(other)
                    trial.others.append(other)
        trial.others = _smallest_first(trial.others)
    return trial.others


def _problem(check: ContractCheck, trial: Trial, call: Sample) -> Problem | None:
    """Asks the check about a call that has an answer. A valid call that fails in a check breaks the promise, too.

    NotApplicable: the operator refuses the call, or the check says so; or it needs more memory than there is, or the
    call fails outside of it, too.
    """
    try:
        if check.order:  # the first one, "runs", asks whether there is an answer
            trial.answer(call)
        return check.function(trial, call)
    except NotApplicable:
        raise
    except Exception as error:
        if is_out_of_memory(said := first_line(error)):
            raise NotApplicable(f"the check takes more memory than it may: {said}") from None
        try:
            trial.fresh_answer(call)
        except Exception as again:
            raise NotApplicable(f"the call does not always work alone: {first_line(again)}") from None
        return Problem(f"The call works alone and fails in this check: {first_line(error)}.")


def _smallest(
    check: ContractCheck, trial: Trial, call: Sample, problem: Problem, progress: Progress
) -> tuple[Problem, Sample]:
    left, shrunk = _SMALLER, True
    while shrunk and left > 0:
        shrunk = False
        for candidate in smaller(trial.subject, call):
            left -= 1
            if 0 < candidate.elements < call.elements and left >= 0:
                progress(check.name, candidate)
                if found := _still(check, trial, candidate):
                    call, problem, shrunk = candidate, found, True
                    break
    return problem, call


def _still(check: ContractCheck, trial: Trial, call: Sample) -> Problem | None:
    """Asks the check about a call that may be invalid."""
    try:
        trial.answer(call)
        return _problem(check, trial, call)
    except NotApplicable:
        return None


def _finding(check: ContractCheck, trial: Trial, problem: Problem, call: Sample | None) -> Finding:
    code = None
    if call is not None:
        problem, written = _written(check, trial, problem, call)
        code = written.code(trial.subject, problem.shown)
    return Finding(check.name, problem.severity, problem.message, code, problem.hint or check.hint)


def _written(check: ContractCheck, trial: Trial, problem: Problem, call: Sample) -> tuple[Problem, WrittenCall]:
    """Writes the call with values that a reader can draw, if these show the same, or else with its own."""
    ways = list(ways_to_write(call, problem.layout, problem.number))
    if not check.whole:
        for way in ways[:-1]:
            if (found := _still(check, trial, way.call)) and (found.layout, found.number) == (
                problem.layout,
                problem.number,
            ):
                return found, way
    return problem, ways[-1]
