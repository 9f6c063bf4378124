"""How a kernel takes numbers: a schema's float is a double in C++."""

from __future__ import annotations

import math
import struct
from typing import Any

from exportkit.operators.contract.definition import ContractCheck, Problem
from exportkit.operators.contract.differences import difference
from exportkit.operators.contract.operator_trial import NotApplicable, Trial
from exportkit.operators.contract.sample import Sample


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
