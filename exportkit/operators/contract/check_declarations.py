"""What is written about an operator: its schema, its wrapper, its reference and samples; and how it takes numbers."""

from __future__ import annotations

import inspect
import math
import struct
from typing import Any

import torch

from exportkit.operators.contract.check_gradients import differentiable, small_enough
from exportkit.operators.contract.definition import ContractCheck, Problem
from exportkit.operators.contract.differences import difference
from exportkit.operators.contract.findings import Severity
from exportkit.operators.contract.operator_trial import NotApplicable, Trial
from exportkit.operators.contract.sample import Sample
from exportkit.operators.contract.schema_rules import schema_findings


@ContractCheck("signatures", "Give it the schema's parameters and defaults.", order=2, whole=True)
def signatures(trial: Trial) -> Problem | None:
    """Wrapper and reference have the schema's parameters."""
    functions = {"reference": trial.subject.reference}
    if trial.subject.spec is not None:
        functions["wrapper"] = trial.subject.spec.wrapper
    given = {what: function for what, function in functions.items() if function is not None}
    if not given:
        raise NotApplicable("there is neither a wrapper nor a reference")
    schema = trial.subject.overload._schema.arguments
    expected = [(a.name, a.default_value if a.has_default_value() else inspect.Parameter.empty) for a in schema]
    for what, function in given.items():
        found = [
            (p.name, list(p.default) if isinstance(p.default, tuple) else p.default)
            for p in inspect.signature(function).parameters.values()
        ]
        if found != expected:
            return Problem(f"The {what} must have the schema's parameters, {_said(expected)}, but has {_said(found)}.")
    return None


def _said(parameters: list[tuple[str, object]]) -> str:
    return ", ".join(name if value is inspect.Parameter.empty else f"{name}={value!r}" for name, value in parameters)


@ContractCheck("schema", "Change the schema.", order=2, whole=True)
def schema(trial: Trial) -> Problem | None:
    """The stable ABI, export and AOTInductor take the schema, and no `int` fixes a size."""
    found = schema_findings(trial.subject.overload._schema)
    if not found:
        return None
    worst = min(found, key=lambda finding: finding.severity is not Severity.broken)
    severity = Severity.broken if trial.subject.spec is not None else worst.severity
    return Problem(worst.message, worst.hint, severity)


@ContractCheck("samples", "Add samples to the SPEC.", order=3, whole=True)
def samples(trial: Trial) -> Problem | None:
    """The SPEC's samples cover the batches that break kernels, and gradcheck has small ones."""
    spec = trial.subject.spec
    if spec is None:
        raise NotApplicable("there is no SPEC")
    first = {next(iter(c.tensors[0].shape), 1) for c in trial.subject.calls if c.tensors}
    if missing := {0, 1, 2, 5} - first:
        # An offset of the batch that is counted twice shows only from 2 on.
        return Problem(f"Samples must have batches of 0, 1, 2 and 5, but there are none of {sorted(missing)}.")
    if spec.differentiable and torch.float64 in spec.dtypes:
        small = [c for c in trial.subject.calls if c.floating_dtype == torch.float64 and _fits_gradcheck(trial, c)]
        if len(small) < 2:
            return Problem("At least 2 samples in float64 must be small enough for gradcheck.")
    return None


def _fits_gradcheck(trial: Trial, call: Sample) -> bool:
    try:
        return small_enough(differentiable(trial, call))
    except NotApplicable:
        return False


# --- numbers: a schema's float is a double in C++ ---------------------------------------------------------------------


@ContractCheck(
    "float-parameter",
    "Write `double` in C++: a schema's float is one, and the stable ABI does not notice another type.",
    order=4,
    dtypes="first",
    most=3,
)
def float_parameter(trial: Trial, call: Sample) -> Problem | None:
    """A number that differs in its last bits alone gives nearly the same answer.

    A kernel whose parameter is `float` reads the last 32 bits of the double, and takes them for the number.
    """
    bound = trial.bound(call)
    names = [a.name for a in trial.subject.overload._schema.arguments if str(a.type).replace("Optional", "") in _FLOATS]
    given = {name: bound[name] for name in names if _numbers(bound[name])}
    if not given or any(not math.isfinite(x) or not x for value in given.values() for x in _numbers(value)):
        raise NotApplicable("it takes no float, or none but 0")
    plain = trial.outputs(call)
    for name, value in given.items():
        changed, doubled = _changed(value, 1), _changed(value, 2)
        answers = [trial.outputs(Sample(call.label, (), bound | {name: other})) for other in (changed, doubled)]
        far = any(difference(a, b, rtol=1e-2, atol=1e-2) for a, b in zip(answers[0], plain))
        # Only the last bits were read, if those alone decide.
        if far and not any(difference(a, b) for a, b in zip(*answers)):
            return Problem(
                f"{name} = {value} and {changed} differ by less than a millionth, but the answers do not: the kernel "
                f"reads half of the number, as it does where {name} is `float` in C++."
            )
    return None


_FLOATS = ("float", "[float]", "List[float]", "[List[float]]")


def _numbers(value: Any) -> list[float]:
    """Returns the floats of an argument, one or a list."""
    return [x for x in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(x, float)]


def _changed(value: Any, times: float) -> Any:
    """Returns the argument times a number, each float with the last bits of another."""
    if isinstance(value, (list, tuple)):
        return [_changed(each, times) for each in value]
    return _with_low_bits(times * value, 3.0) if isinstance(value, float) else value


def _with_low_bits(value: float, low: float) -> float:
    """Returns a number near a value whose last 32 bits are those of another number as a float32."""
    return float(struct.unpack("<d", struct.pack("<f", low) + struct.pack("<d", value)[4:])[0])
