"""Overloads that write into tensors of the caller: torch's compiler may call one in the place of an operator."""

from __future__ import annotations

import functools

import torch
from torch import FunctionSchema
from torch._ops import OpOverload

from exportkit.operators.contract.check_values import tolerance
from exportkit.operators.contract.definition import ContractCheck, Problem
from exportkit.operators.contract.differences import first_difference
from exportkit.operators.contract.operator_trial import NotApplicable, Trial
from exportkit.operators.contract.sample import Sample


@ContractCheck(
    "out-overload",
    "Let both call the same code. torch.compile may call the overload in the place of the operator.",
    order=31,
    dtypes="first",
    most=4,
    unless=("determinism", "mutation", "aliasing"),
)
def out_overload(trial: Trial, call: Sample) -> Problem | None:
    """The overload with the tag `out` writes what the operator returns."""
    overload = tagged_overload(trial.subject.overload)
    expected = trial.outputs(call)
    names = _written(overload._schema)
    if len(names) != len(expected):
        raise NotApplicable("it returns a list of tensors")
    room = {name: torch.ones_like(tensor) for name, tensor in zip(names, expected)}
    own = call.copied()
    shown = (
        "results = {call}\nresults = results if isinstance(results, tuple) else (results,)\n"
        f"room = dict(zip({names!r}, map(torch.ones_like, results)))\n"
        f"torch.ops.{overload}(*args, **room)\nprint(results, room)"
    )
    overload(*own.args, **own.kwargs, **room)
    if found := first_difference([*room.values()], expected, functools.partial(tolerance, trial)):
        said = f"{overload} must write what the operator returns, but in output {found[0]} {found[1]}."
        return Problem(said, shown=shown)
    return None


def tagged_overload(operator: OpOverload) -> OpOverload:
    """Returns the overload with the tag `out` that torch takes for an operator's, or raises NotApplicable."""
    tag = getattr(torch.Tag, "out", None)  # torch 2.11 has none
    packet = operator.overloadpacket
    for name in packet.overloads():
        other: OpOverload = getattr(packet, name)
        if tag in other.tags and not operator._schema.is_mutable and _alike(other._schema, operator._schema):
            return other
    raise NotApplicable("no overload has the tag out")


def _written(schema: FunctionSchema) -> list[str]:
    return [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]


def _alike(out: FunctionSchema, functional: FunctionSchema) -> bool:
    """Whether one takes what the other takes, and a tensor for each that the other returns."""
    written = _written(out)
    given = [(a.name, str(a.type)) for a in out.arguments if a.name not in written]
    returned = all(isinstance(r.type, torch._C.TensorType) for r in functional.returns)
    return given == [(a.name, str(a.type)) for a in functional.arguments] and (
        returned and len(written) == len(functional.returns)
    )
