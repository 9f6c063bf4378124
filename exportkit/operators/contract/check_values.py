"""The values of an answer: there is one, always the same, that of a reference, also where an input is not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from exportkit.operators.contract.definition import ContractCheck, Problem
from exportkit.operators.contract.differences import first_difference
from exportkit.operators.contract.findings import Severity
from exportkit.operators.contract.operator_spec import DEFAULT_TOLERANCES
from exportkit.operators.contract.operator_trial import NotApplicable, Trial, is_out_of_memory
from exportkit.operators.contract.sample import Sample


def reference_of(trial: Trial) -> Callable[..., Any]:
    """Returns the reference.

    Raises:
        NotApplicable: There is none.
    """
    if trial.subject.reference is None:
        raise NotApplicable("no reference is given")
    return trial.subject.reference


def tolerance(trial: Trial, dtype: torch.dtype) -> tuple[float, float]:
    """Returns (rtol, atol) of the kernel against the reference: the SPEC's, or the default ones."""
    return trial.subject.spec.tolerance(dtype) if trial.subject.spec else DEFAULT_TOLERANCES.get(dtype, (0.0, 0.0))


def upcast(call: Sample) -> Sample:
    """Returns the call with every floating tensor in float64."""
    return call.with_tensors(lambda t: t.double() if t.is_floating_point() else t)


_RUNS = 3
_LARGE_RUNS = 2
_LARGE = 4096


@ContractCheck("runs", "Make the kernel take the call, or do not list the call as a valid one.", order=0)
def runs(trial: Trial, call: Sample) -> Problem | None:
    """A valid call has an answer."""
    try:
        trial.answer(call)
    except NotApplicable as refusal:
        if is_out_of_memory(str(refusal)):
            raise
        return Problem(f"A valid call must have an answer, but {refusal}.")
    return None


@ContractCheck(
    "determinism",
    "Initialise all memory that is read, refuse indices that lead beyond it, draw no random numbers, and sum in one "
    "order: no atomic additions of floats.",
    order=5,
)
def determinism(trial: Trial, call: Sample) -> Problem | None:
    """The same call has the same answer, bit for bit."""
    first = trial.answer(call)
    for _ in range((_RUNS if call.elements <= _LARGE else _LARGE_RUNS) - 1):
        if found := first_difference(trial.fresh_answer(call), first):
            index, text = found
            return Problem(
                f"The same call must have the same answer, bit for bit, but in output {index} {text}.",
                shown="first, second = {op}(*args), {op}(*args)",
            )
    return None


_HINT = "Look at the smallest call: correct the kernel, or the reference."


@ContractCheck("reference", _HINT, order=30, unless=("determinism",))
def equals_reference(trial: Trial, call: Sample) -> Problem | None:
    """The kernel computes what the reference computes in the same dtype."""
    actual, expected = trial.answer(call), trial.fresh_answer(call, reference_of(trial))
    return _compared(trial, actual, expected, "the reference")


@ContractCheck("reference-float64", _HINT, order=30, unless=("determinism", "reference"))
def equals_reference_in_float64(trial: Trial, call: Sample) -> Problem | None:
    """The kernel is as exact as its dtype: a reference in the kernel's own dtype could share its error."""
    actual, exact = trial.answer(call), trial.fresh_answer(upcast(call), reference_of(trial))
    expected = [e.to(a.dtype) for a, e in zip(actual, exact)] if len(actual) == len(exact) else exact
    return _compared(trial, actual, expected, "the reference in float64")


def _compared(trial: Trial, actual: list[Tensor], expected: list[Tensor], what: str) -> Problem | None:
    if len(actual) != len(expected):
        return Problem(f"The operator returns {len(actual)} tensors, and {what} {len(expected)}.")
    for index, (a, e) in enumerate(zip(actual, expected)):
        rtol, atol = tolerance(trial, e.dtype)
        if found := first_difference([a], [e], rtol, atol):
            return Problem(f"Output {index} must equal {what} (rtol {rtol:g}, atol {atol:g}), but {found[1]}.")
    return None


# --- NaN and infinities -----------------------------------------------------------------------------------------------

_NAN_HINT = (
    "Use comparisons and functions that keep NaN: fmin, fmax, std::min and std::max drop it. If the operator means to "
    "drop NaN, give it a reference that says so."
)
_FEW_ELEMENTS = 4096


@ContractCheck("nan", _NAN_HINT, order=45, dtypes="some", most=6, unless=("determinism", "reference"))
def nan(trial: Trial, call: Sample) -> Problem | None:
    """NaN that goes in comes out, wherever a reference, the kernel in float64, or its influence says that it does."""
    return _kept(trial, call, (math.nan,))


@ContractCheck("infinity", _NAN_HINT, order=45, dtypes="some", most=6, unless=("determinism", "reference"))
def infinity(trial: Trial, call: Sample) -> Problem | None:
    """An infinite input gives a finite output only where a reference, or the kernel in float64, says so."""
    if trial.subject.reference is None and call.floating_dtype == torch.float64:
        raise NotApplicable("there is nothing to compare with: no reference is given, and the call is in float64")
    return _kept(trial, call, (math.inf, -math.inf))


def _kept(trial: Trial, call: Sample, values: tuple[float, ...]) -> Problem | None:
    clean = trial.answer(call)
    if call.elements > _FEW_ELEMENTS or not _all_finite([*clean, *call.tensors]):
        raise NotApplicable("the call is large, or it is not finite already")
    if not all(t.numel() for t in call.tensors):
        raise NotApplicable("a tensor is empty, and a sum over nothing is 0 whatever it is multiplied with")
    for value in values:
        for number, where, poisoned in _poisoned(call, value):
            if missing := _laundered(trial, call, poisoned, number, where, value):
                severity = Severity.broken if trial.subject.reference else Severity.doubtful
                shown = (
                    f"args = list(args)\nargs[{number}].view(-1)[{where}] = {float_code(value)}\nprint({{op}}(*args))"
                )
                if trial.subject.is_mutable or any(not isinstance(a, Tensor) for a in call.args[: number + 1]):
                    shown = "{call}"
                name = list(trial.bound(call))[number] if number < len(trial.bound(call)) else "an input"
                return Problem(
                    f"Element {where} of {name} is {value}, {missing}.",
                    severity=severity,
                    shown=shown,
                )
    return None


def float_code(value: float) -> str:
    """Returns the code of a number."""
    return repr(value) if math.isfinite(value) else f'float("{value}")'


def _all_finite(values: list[Tensor]) -> bool:
    return all(bool(torch.isfinite(t).all()) for t in values if t.is_floating_point())


def _with_element(call: Sample, number: int, where: int, change: Callable[[Tensor], Any]) -> Sample:
    """Returns the call with one element of its tensor `number` changed."""
    own = call.with_tensors(Tensor.contiguous).copied()
    element = own.tensors[number].view(-1)[where]
    element.copy_(torch.as_tensor(change(element)).to(element))
    return own


def _poisoned(call: Sample, value: float) -> Iterator[tuple[int, int, Sample]]:
    """Yields the call with the first and the last element of each floating tensor changed to the value."""
    for number, tensor in enumerate(call.tensors):
        if tensor.is_floating_point() and tensor.numel():
            for where in sorted({0, tensor.numel() - 1}):
                yield number, where, _with_element(call, number, where, lambda _: value)


def _laundered(trial: Trial, call: Sample, poisoned: Sample, number: int, where: int, value: float) -> str | None:
    """Says where an output should not be finite and is."""
    actual = trial.varied_answer(poisoned, f"{value} in an argument")
    if trial.subject.reference is not None:
        expected, what = trial.varied_answer(poisoned, f"{value}", trial.subject.reference), "the reference"
    elif (wide := _in_float64(trial, poisoned)) is not None:
        expected, what = wide, "the kernel in float64"
    elif value == value:
        return None
    else:
        return _without_influence(trial, call, actual, number, where)
    for index, (a, e) in enumerate(zip(actual, expected)):
        if a.is_floating_point() and e.is_floating_point() and a.shape == e.shape:
            bad = (e.isnan() & ~a.isnan()) if value != value else (e.isinf() & a.isfinite())
            if bool(bad.any()):
                at = bad.nonzero()[0].tolist()
                return (
                    f"and by {what}, element {at} of output {index} is {e[tuple(at)].item()}, but the operator returns "
                    f"{a[tuple(at)].item()!r}"
                )
    if what == "the kernel in float64" and value != value:
        return _without_influence(trial, call, actual, number, where)
    return None


def _in_float64(trial: Trial, call: Sample) -> list[Tensor] | None:
    if call.floating_dtype == torch.float64:
        return None
    try:
        return trial.fresh_answer(upcast(call))
    except Exception:  # the operator may not take float64; then nothing is compared with it
        return None


def _without_influence(trial: Trial, call: Sample, actual: list[Tensor], number: int, where: int) -> str | None:
    """Says so if a finite change of the element changes a floating output, and NaN leaves no trace in any output."""
    outputs = [t for t in actual if t.is_floating_point()]
    if not outputs or not _all_finite(outputs):
        return None
    clean = [t for t in trial.answer(call) if t.is_floating_point()]
    for change in (lambda x: x + 1, lambda x: -2 * x - 1):
        changed = trial.varied_answer(_with_element(call, number, where, change), "other values")
        other = [t for t in changed if t.is_floating_point()]
        if found := first_difference(other, clean):
            index, _ = found
            return f"which other numbers in its place show in output {index}, but all outputs are finite"
    return None
