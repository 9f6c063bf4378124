"""What is asked of a kernel beside its values: it answers, and always the same."""

from __future__ import annotations

from exportkit.operators.contract.definition import Problem, of_call
from exportkit.operators.contract.differences import first_difference
from exportkit.operators.contract.operator_trial import NotApplicable, Trial
from exportkit.operators.contract.sample import Sample

_RUNS = 3
_LARGE_RUNS = 2
_LARGE = 4096


@of_call("runs", "Make the kernel take the call, or do not list the call as a valid one.", order=0)
def runs(trial: Trial, call: Sample) -> Problem | None:
    """A valid call has an answer."""
    try:
        trial.answer(call)
    except NotApplicable as refusal:
        return Problem(f"A valid call must have an answer, but {refusal}.")
    return None


@of_call(
    "determinism",
    "Initialise all memory that is read, draw no random numbers, and sum in one order: no atomic additions of floats.",
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
