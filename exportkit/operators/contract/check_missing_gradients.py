"""Operators without a gradient: what a model meets that asks for one."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from exportkit.operators.contract.definition import ContractCheck, Problem
from exportkit.operators.contract.findings import Severity
from exportkit.operators.contract.operator_trial import NotApplicable, Trial, first_line
from exportkit.operators.contract.sample import Sample, tensors

_CALLS = 3
"""How many calls are tried: some may return no floating tensor, or take a way without a gradient."""

_WARNS = "::WarnNotImplemented"
"""The end of the name of what torch records, unless it is asked not to, for an operator without an autograd kernel."""

_TORCHS_WORDS = re.compile(
    r"no autograd formula was registered|derivative for \S+ is not implemented|an autograd kernel was not registered"
)
"""What torch says, and not the operator's author: of a custom_op, by a fallback in C++, and in a later version."""


@ContractCheck(
    "gradient-missing",
    "Write one with torch.library.register_autograd; `exportkit ops new` writes an operator that has one. If there "
    "shall be none, register a backward that raises an error with what to do instead, or say differentiable=() in an "
    "OpSpec.",
    order=70,
    whole=True,
    unless=("gradient-recorded", "mutation", "aliasing"),
)
def gradient_missing(trial: Trial) -> Problem | None:
    """Where floating tensors go in and come out, there is a gradient, or an error that says why there is none."""
    spec = trial.subject.spec
    if trial.subject.is_mutable:
        raise NotApplicable("the operator writes to an argument")
    if spec is not None and not spec.differentiable:
        raise NotApplicable("the SPEC names no argument with a gradient")
    said = [_missing(trial, call) for call in _floating_calls(trial)]
    if None in said:
        return None
    return Problem(str(said[0]), severity=Severity.note if spec is None else Severity.broken)


def _floating_calls(trial: Trial) -> list[Sample]:
    """Returns the smallest calls with floating tensors on both sides."""
    calls = sorted((c for c in trial.subject.calls if c.floating_dtype), key=lambda c: (not c.elements, c.elements))
    if not calls:
        raise NotApplicable("no call has a floating tensor")
    found = [call for call in calls[:_CALLS] if any(t.is_floating_point() for t in trial.outputs(call))]
    if not found:
        raise NotApplicable("no call returns a floating tensor")
    return found


def _missing(trial: Trial, call: Sample) -> str | None:
    """Says what happens to a model that asks for the gradient of a call, or returns None if there is one."""
    own = call.copied().with_tensors(lambda t: t.requires_grad_() if t.is_floating_point() else t)
    leaves = [t for t in own.tensors if t.is_floating_point()]
    try:
        results = [t for t in tensors(trial.run(own, trial.subject.overload)) if t.is_floating_point()]
        recorded = [t for t in results if t.grad_fn is not None]
        if not recorded:
            return _SILENT
        if all(_name(t).endswith(_WARNS) for t in recorded):
            return _WARNED
        torch.autograd.grad([t.sum() for t in recorded], leaves, allow_unused=True)
    except RuntimeError as error:
        if _TORCHS_WORDS.search(str(error)):
            return f"No gradient is registered: asking for one, also inside of a model, raises {first_line(error)}."
    return None  # the author's own error is an answer, too


_SILENT = (
    "No gradient is registered, and what the operator returns requires none: torch.autograd.grad fails, also inside of "
    "a model, and loss.backward() silently leaves out what goes through the operator."
)
_WARNED = (
    "No gradient is registered: torch.autograd.grad fails, also inside of a model, and loss.backward() leaves out what "
    "goes through the operator, with a warning only."
)


def _name(tensor: Tensor) -> str:
    return tensor.grad_fn.name() if tensor.grad_fn is not None else ""
