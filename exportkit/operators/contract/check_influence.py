"""What an operator is given, and does not look at."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from exportkit.operators.contract.definition import ContractCheck, Problem
from exportkit.operators.contract.differences import first_difference
from exportkit.operators.contract.findings import Severity
from exportkit.operators.contract.operator_trial import NotApplicable, Trial
from exportkit.operators.contract.sample import Sample

_FEW_ELEMENTS = 4096
_CALLS = 12


@ContractCheck(
    "influence",
    "Look at the first and the last step of each loop, and at what the kernel does with each argument. If it is unused "
    "on purpose, say so where users read it.",
    order=46,
    dtypes="first",
    unless=("determinism", "reference"),
    whole=True,
)
def influence(trial: Trial) -> Problem | None:
    """Each floating tensor shows in an answer, and so do its first and last elements where the others do."""
    subject = trial.subject
    if subject.reference is not None or subject.spec is not None or subject.is_mutable:
        raise NotApplicable("there is a reference or a SPEC, or the operator writes to an argument")
    silent: dict[int, Problem] = {}
    heard: set[int] = set()
    calls = [call for call in subject.calls if 0 < call.elements <= _FEW_ELEMENTS and _floating_only(call)]
    for call in calls[:_CALLS]:
        for number, tensor in enumerate(call.tensors):
            if not _shows(trial, call, number, ...):
                silent.setdefault(number, _doubt(call, f"No value of tensor {number} shows in any answer."))
                continue
            heard.add(number)
            for what, end, neighbour in _ends(trial, call, tensor):
                if not _shows(trial, call, number, end) and _shows(trial, call, number, neighbour):
                    text = f"No value of {what} of tensor {number} shows in the answer, and those beside it do."
                    return _doubt(call, text)
    if not heard:
        raise NotApplicable("no small call has floating tensors alone")
    return next((problem for number, problem in silent.items() if number not in heard), None)


def _floating_only(call: Sample) -> bool:
    """Integers and masks choose among elements, and others then do not show."""
    if not all(t.is_floating_point() and t.element_size() > 1 and t.numel() for t in call.tensors):
        return False
    return all(bool(t.isfinite().all()) for t in call.tensors)


def _doubt(call: Sample, text: str) -> Problem:
    return Problem(text, severity=Severity.doubtful, call=call)


def _shows(trial: Trial, call: Sample, number: int, where: Any) -> bool:
    """Whether another value there changes an answer."""
    for change in (10.0, -10.0):
        own = call.copied()
        own.tensors[number][where] += change
        if first_difference(trial.varied_answer(own, "other values"), trial.answer(call)):
            return True
    return False


def _ends(trial: Trial, call: Sample, tensor: Tensor) -> list[tuple[str, Any, Any]]:
    """Returns the ends of a tensor, each with its neighbour. Not after a crop: if outputs have sizes of their own."""
    sizes = {1, *(size for t in call.tensors for size in t.shape)}
    if any(size not in sizes for t in trial.answer(call) for size in t.shape):
        return []
    dims = [dim for dim in sorted({0, tensor.dim() - 1}) if dim < tensor.dim() and tensor.shape[dim] > 2]
    ends = (("first", 0, 1), ("last", -1, -2))
    return [
        (f"the {what} of dimension {dim}", (*[slice(None)] * dim, end), (*[slice(None)] * dim, beside))
        for dim in dims
        for what, end, beside in ends
    ]
