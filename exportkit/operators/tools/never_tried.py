"""What the calls of a check leave out, so that "ok" is not read as more than it says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch._ops import OpOverload

from exportkit.operators.contract.findings import OperatorReport
from exportkit.operators.contract.sample import Sample, bound_arguments
from exportkit.operators.tools.forms import Argument, arguments_of
from exportkit.operators.tools.registered import gradient_of

_PLACES = ("Device", "Layout", "MemoryFormat", "Generator")  # there is mostly one that fits


def never_tried(operator: OpOverload, calls: Sequence[Sample], report: OperatorReport) -> tuple[str, ...]:
    """Says which arguments were never given or had one value in all calls, and why gradients were not checked."""
    bound = [bound_arguments(operator, call.args, call.kwargs) for call in calls]
    arguments = [a for a in arguments_of(operator._schema) if a.kind not in _PLACES]
    said = [text for a in arguments for text in _said(a, [values[a.name] for values in bound])]
    gradient = report.skipped.get("gradcheck")
    if gradient is not None and gradient_of(report.operator) and "gradient-reference" not in report.passed:
        said.append(f"gradient not checked: {gradient}")
    return tuple(said)


def _said(argument: Argument, values: Sequence[Any]) -> Iterator[str]:
    if all(value is None for value in values):
        yield f"{argument.name} is never given"
    elif argument.listed:
        lengths = {len(value) for value in values if value is not None}
        if argument.length is None and len(lengths) == 1:
            yield f"the length of {argument.name} is always {lengths.pop()}"
    elif not argument.is_tensor and len(different := {repr(value) for value in values}) == 1:
        yield f"{argument.name} is always {different.pop()}"
