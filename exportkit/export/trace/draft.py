"""Finds everything that keeps a model from being exported, in one run; and sizes with which it can be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from exportkit.errors import ExportError, OperatorNotExportableError, UsageError
from exportkit.export.export_options import TraceOptions
from exportkit.export.models.option_parsing import size_of
from exportkit.export.models.placement import usable_device
from exportkit.export.models.resolved import EagerModel, ResolvedModel
from exportkit.export.models.source_lines import user_frame, where
from exportkit.export.sizes.shapes import DynamicSizes
from exportkit.export.sizes.size_changes import SizeChange, violated_names
from exportkit.export.torch_patches.operator_bodies import BodyError
from exportkit.export.trace.explain import advice, explain_refusal, needs_value, sizes_error
from exportkit.export.trace.judged_sizes import export_judged
from exportkit.export.trace.preflight import check_operators, graph_operators
from exportkit.export.trace.size_search import changes_that_trace
from exportkit.export.trace.torch_draft import DraftProblem, draft_export
from exportkit.export.trace.torch_export import RefusedByTorchError, TracingTask
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
        expression: What Python needs to know, or None.
        file: The file of the user's line, or None.
        line: Its number, or None.
        source: Its text, or None.
        occurrences: How often the line needed it.
        variables: The local variables there, as torch describes them.
    """

    kind: Literal["operator", "value", "size", "other"]
    message: str
    hint: str | None = None
    operator: str | None = None
    expression: str | None = None
    file: str | None = None
    line: int | None = None
    source: str | None = None
    occurrences: int = 1
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Draft:
    """The findings, and the sizes with which torch.export takes the model where sizes were the reason."""

    findings: tuple[DraftFinding, ...]
    changes: tuple[SizeChange, ...] = ()


def draft_of(model: ResolvedModel, options: TraceOptions) -> Draft:
    """Looks for every reason at once. Nothing is compiled or written.

    Raises:
        UsageError: The model is an exported program, or an option names an unknown parameter, dimension or dtype.
        HostError: This machine does not have the device.
    """
    device = usable_device(options.device)
    findings: list[DraftFinding] = []
    changes: list[SizeChange] = []
    eager = _eager(model, "--draft")
    with ready_to_trace(eager, options, device) as ready:
        for name, (task, sizes) in ready.tasks.items():
            found = _draft_of_method(task, sizes, device)
            of = "" if len(ready.tasks) == 1 else f"{name}: "
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
        program, problems = draft_export(task, sizes)
    except RefusedByTorchError as refused:
        found = _other(explain_refusal(refused, task))
        if isinstance(refused.error, BodyError):
            found = replace(found, kind="operator", operator=refused.error.operator)
        return Draft((found,))
    findings = _unfit_operators(program, device)
    known = {finding.operator for finding in findings}
    findings += [_finding(problem) for problem in problems if problem.operator not in known]
    if findings:
        return Draft(tuple(findings))  # torch.export stops at the first of them, so sizes cannot be tried
    try:
        check_writes(export_judged(task, sizes)[0], task.bound, task.spec)
    except RefusedByTorchError as refused:
        if not violated_names(str(refused)):
            return Draft((_other(explain_refusal(refused, task)),))
        changes = changes_that_trace(task, refused, TRIES)
        error = sizes_error(refused, changes)
        return Draft((DraftFinding("size", error.message, error.hint),), changes)
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
    with ready_to_trace(eager, options, usable_device(options.device)) as ready:
        for task, sizes in ready.tasks.values():
            found += [each for each in _suggested(task, sizes, allow_narrowing) if each not in found]
    return tuple(found)


def _suggested(task: TracingTask, sizes: DynamicSizes, allow_narrowing: bool) -> tuple[SizeChange, ...]:
    try:
        export_judged(task, sizes)
    except RefusedByTorchError as refused:
        if not violated_names(str(refused)):
            raise explain_refusal(refused, task) from refused.error
        changes = changes_that_trace(task, refused, TRIES)
        if changes and (allow_narrowing or not any(change.narrows for change in changes)):
            return changes
        error = sizes_error(refused, changes)
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


def _finding(problem: DraftProblem) -> DraftFinding:
    if problem.operator:
        return DraftFinding(
            "operator",
            f"the fake kernel of {problem.operator} is wrong: {problem.reason.strip()}",
            "Correct it: code compiled for a wrong shape or dtype reads outside of the tensor.",
            operator=problem.operator,
        )
    frame = user_frame(problem.frames)
    place = where(frame) if frame else ""
    what, hint = needs_value(place, is_truth=problem.result in ("True", "False"))
    return DraftFinding(
        "value",
        f"{what}{f' at {place}' if place else ''} (it was {problem.result} for the example inputs)",
        hint,
        expression=problem.reason,
        file=frame.filename if frame else None,
        line=frame.lineno if frame else None,
        source=frame.line if frame else None,
        occurrences=problem.occurrences,
        variables=problem.variables or {},
    )


def _other(error: ExportError | UsageError) -> DraftFinding:
    return DraftFinding("other", error.message, error.hint)
