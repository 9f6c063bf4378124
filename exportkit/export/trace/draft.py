"""Finds everything that keeps a model from being exported, in one run; and sizes with which it can be."""

from __future__ import annotations

import os
import re
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch._logging._internal import DTRACE_ENV_VAR
from torch._logging.structured import INTERN_TABLE

from exportkit.errors import ExportError, OperatorNotExportableError, UsageError
from exportkit.export.export_options import TraceOptions
from exportkit.export.models.option_parsing import size_of
from exportkit.export.models.placement import usable_device
from exportkit.export.models.resolved import EagerModel, ResolvedModel
from exportkit.export.models.source_lines import user_frame, where
from exportkit.export.sizes.shapes import DynamicSizes
from exportkit.export.sizes.size_changes import SizeChange
from exportkit.export.torch_patches.operator_bodies import BodyError
from exportkit.export.trace.explain import advice, explain_refusal, explained_with_changes, needs_value
from exportkit.export.trace.judged_sizes import export_judged
from exportkit.export.trace.preflight import check_operators, graph_operators
from exportkit.export.trace.torch_export import RefusedByTorchError, TracingTask, call_export
from exportkit.export.trace.trace import ready_to_trace, trace
from exportkit.export.trace.trace_method import check_writes
from exportkit.progress import silent

TRIES = 5
"""How often a search for sizes traces the model."""


@dataclass(frozen=True)
class DraftFinding:
    """One reason why the model cannot be exported.

    Attributes:
        kind: `operator`, `value` (Python needs a tensor's value), `size`, or `other`.
        message: What is wrong.
        hint: What to write instead.
        operator: The operator's name, or None.
        file: The file of the user's line, or None.
        line: Its number, or None.
    """

    kind: Literal["operator", "value", "size", "other"]
    message: str
    hint: str | None = None
    operator: str | None = None
    file: str | None = None
    line: int | None = None


@dataclass(frozen=True)
class Draft:
    """The findings, and the sizes with which torch.export takes the model where sizes were the reason."""

    findings: tuple[DraftFinding, ...]
    changes: tuple[SizeChange, ...] = ()


def draft_of(model: ResolvedModel, options: TraceOptions) -> Draft:
    """Looks for every reason at once. Nothing is compiled or written."""
    device = usable_device(options.device)
    findings: list[DraftFinding] = []
    changes: list[SizeChange] = []
    eager = _eager(model, "--draft")
    with ready_to_trace(eager, options, device) as (_, tasks):
        for name, (task, sizes) in tasks.items():
            found = _draft_of_method(task, sizes, device)
            of = "" if len(tasks) == 1 else f"{name}: "
            findings += [replace(each, message=f"{of}{each.message}") for each in found.findings]
            changes += [each for each in found.changes if each not in changes]
    if not findings:
        try:
            trace(eager, options, device, silent)  # which calls the model at the ends of the ranges, too
        except (ExportError, UsageError) as error:
            findings.append(_other(error))
    return Draft(tuple(findings), tuple(changes))


def _draft_of_method(task: TracingTask, sizes: DynamicSizes, device: torch.device) -> Draft:
    try:
        with _trace_files():
            program, _ = call_export(torch.export.draft_export, task, sizes)
    except RefusedByTorchError as refused:
        found = _other(explain_refusal(refused, task))
        if isinstance(refused.error, BodyError):
            found = replace(found, kind="operator", operator=refused.error.operator)
        return Draft((found,))
    findings = _unfit_operators(program, device)
    known = {finding.operator for finding in findings}
    report: Any = program._report  # type: ignore[attr-defined]  # draft_export adds it
    problems = [(failure.failure_type.name, failure.data) for failure in report.failures]
    wrong = [_wrong_fake(data) for kind, data in problems if kind in ("MISSING_FAKE_KERNEL", "MISMATCHED_FAKE_KERNEL")]
    findings += [each for each in wrong if each.operator not in known]
    # torch reports conditions on sizes too. exportkit's own search says more about them.
    findings += [_needed_value(data) for kind, data in problems if kind == "DATA_DEPENDENT_ERROR"]
    if findings:
        return Draft(tuple(findings))  # torch.export stops at the first of them, so sizes cannot be tried
    try:
        check_writes(export_judged(task, sizes)[0], task.bound, task.spec)
    except RefusedByTorchError as refused:
        error, changes = explained_with_changes(refused, task, TRIES)
        return Draft((DraftFinding("size" if refused.names else "other", error.message, error.hint),), changes)
    except ExportError as error:
        return Draft((_other(error),))
    return Draft(())


def suggested_changes(model: ResolvedModel, options: TraceOptions, *, allow_narrowing: bool) -> tuple[SizeChange, ...]:
    """Returns the changes of sizes with which torch.export takes the model; none if it takes it as it is.

    Raises:
        UsageError: The model is an exported program, or an option names an unknown parameter, dimension or dtype.
        ExportError: No sizes were found in five tries, they are narrower and that is not allowed, or sizes are not the
            reason.
        HostError: This machine does not have the device.
    """
    eager = _eager(model, "--apply-suggested-fixes")
    found: list[SizeChange] = []
    with ready_to_trace(eager, options, usable_device(options.device)) as (_, tasks):
        for task, sizes in tasks.values():
            found += [each for each in _suggested(task, sizes, allow_narrowing) if each not in found]
    return tuple(found)


def _suggested(task: TracingTask, sizes: DynamicSizes, allow_narrowing: bool) -> tuple[SizeChange, ...]:
    try:
        export_judged(task, sizes)
    except RefusedByTorchError as refused:
        error, changes = explained_with_changes(refused, task, TRIES)
        if changes and (allow_narrowing or not any(change.narrows for change in changes)):
            return changes
        if changes:
            narrower = f"The sizes that work are narrower than those asked for: {advice(changes)}."
            error = ExportError(error.message, hint=f"{narrower} --allow-narrowing takes them.")
        raise error from refused.error
    return ()


def with_changes(options: TraceOptions, changes: Sequence[SizeChange]) -> TraceOptions:
    """Returns the options with each changed place's size in place of the one given before."""
    changed = {change.place: change.after for change in changes}
    kept = [text for text in options.dynamic if text.partition("=")[0].strip() not in changed]
    names = {size.dimension for text in changed.values() if (size := size_of(text))}
    return replace(
        options,
        dynamic=(*kept, *(f"{place}={after}" for place, after in changed.items())),
        ranges=tuple(text for text in options.ranges if text.partition("=")[0].strip() not in names),
    )


def _eager(model: ResolvedModel, option: str) -> EagerModel:
    if not isinstance(model, EagerModel):
        raise UsageError(
            f"{option}: {model.path} is an exported program, whose sizes are fixed", hint="Name the model itself."
        )
    return model


def _unfit_operators(program: torch.export.ExportedProgram, device: torch.device) -> list[DraftFinding]:
    found = []
    for name, operator in graph_operators(program.graph_module).items():
        try:
            check_operators({name: operator}, device)
        except OperatorNotExportableError as error:
            found.append(DraftFinding("operator", error.message, error.hint, operator=name))
    return found


@contextmanager
def _trace_files() -> Iterator[None]:
    """Gives torch a temporary folder for the files that a draft leaves behind."""
    before = os.environ.get(DTRACE_ENV_VAR)
    with tempfile.TemporaryDirectory(prefix="exportkit-draft") as folder:
        os.environ[DTRACE_ENV_VAR] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ[DTRACE_ENV_VAR]
            else:
                os.environ[DTRACE_ENV_VAR] = before


def _wrong_fake(data: Mapping[str, Any]) -> DraftFinding:
    """Returns what torch's report says of an operator's fake kernel."""
    namespace, _, name = str(data["op"]).partition(".")
    operator = f"{namespace}::{name.removesuffix('.default')}"
    return DraftFinding(
        "operator",
        f"the fake kernel of {operator} is wrong: {data.get('reason', '').strip()}",
        "Correct it: code compiled for a wrong shape or dtype reads outside of the tensor.",
        operator=operator,
    )


def _needed_value(data: Mapping[str, Any]) -> DraftFinding:
    """Returns what torch's report says of a value that Python needs."""
    files = {number: name for name, number in INTERN_TABLE.items()}  # the report lacks names that torch wrote before
    frame = user_frame(
        traceback.FrameSummary(files.get(each["filename"], ""), each["line"], each["name"], line=each["loc"])
        for each in data["user_stack"]
    )
    result, place = str(data["result"]), where(frame) if frame else ""
    if re.search(r"^(Eq|Ne)\(|[<>]", str(data["expr"])):  # torch 2.11 writes the truth of a relation as a number
        result = {"0": "False", "1": "True"}.get(result, result)
    what, hint = needs_value(place, is_truth=result in ("True", "False"))
    return DraftFinding(
        "value",
        f"{what}{f' at {place}' if place else ''} (it was {result} for the example inputs)",
        hint,
        file=frame.filename if frame else None,
        line=frame.lineno if frame else None,
    )


def _other(error: ExportError | UsageError) -> DraftFinding:
    return DraftFinding("other", error.message, error.hint)
