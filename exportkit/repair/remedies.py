"""The options that a repair tries, the cheapest first."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from exportkit.package.compiled_with import GivenOptions

_NO_FUSION: Mapping[str, Any] = {
    "max_fusion_size": 1,
    "epilogue_fusion": False,
    "realize_opcount_threshold": 0,
    "realize_cpu_opcount_threshold": 0,
}
# What users turn on and what costs accuracy, with torch's own value.
_STRICT: Mapping[str, Any] = {
    "cpp.enable_floating_point_contract_flag": "off",
    "cpp.enable_unsafe_math_opt_flag": False,
    "emulate_precision_casts": True,
}


@dataclass(frozen=True)
class Remedy:
    """Options that may make the code right.

    Attributes:
        what: What they do, in words.
        given: The options.
        local: Whether they change one operator only, so that the rest of the code is as fast as before.
    """

    what: str
    given: GivenOptions
    local: bool = False


@dataclass(frozen=True)
class Patient:
    """What decides which remedies there are.

    Attributes:
        device: cpu or cuda.
        halves: Whether a value has a floating dtype of 16 bits or fewer.
        known: The options that this torch has.
        asked: The options that the user gave.
        operators: Operators at which the code goes wrong.
    """

    device: str
    halves: bool
    known: Collection[str]
    asked: Mapping[str, Any]
    operators: Sequence[str]


def remedies(patient: Patient) -> Iterator[Remedy]:
    """Yields what to try, in the order of what it usually costs; at last several together, and all left to eager."""
    single = [remedy for remedy in _single(patient) if set(remedy.given.inductor_config) <= set(patient.known)]
    yield from single
    together = GivenOptions()
    for remedy in single:
        together = together.with_more(remedy.given)
    if len(single) > 1:
        yield Remedy("all of these together", together)
    yield Remedy("every operator left to eager's kernel", GivenOptions({}, ("aten",)))


def _single(patient: Patient) -> Iterator[Remedy]:
    if strict := {name: value for name, value in _STRICT.items() if patient.asked.get(name, value) != value}:
        yield Remedy("without the options that allow inaccurate code", GivenOptions(strict))
    if patient.halves:
        yield Remedy("values rounded to their dtype, as eager does", GivenOptions({"emulate_precision_casts": True}))
    if patient.device == "cuda":
        numerics = {"eager_numerics.division_rounding": True, "eager_numerics.use_pytorch_libdevice": True}
        known = {name: value for name, value in numerics.items() if name in patient.known}
        if known:
            yield Remedy("division and functions as eager's", GivenOptions(known))
    if aten := tuple(name for name in patient.operators if name.startswith("aten.")):
        yield Remedy(left_to_eager(aten), GivenOptions({}, aten), local=True)
    if patient.device == "cuda":
        yield Remedy("reductions in one kernel", GivenOptions({"split_reductions": False}))
    yield Remedy("no patterns replaced in the graph", GivenOptions({"pattern_matcher": False}))
    yield Remedy("nothing fused", GivenOptions(_NO_FUSION))
    if patient.device == "cpu":
        yield Remedy("no vector instructions written", GivenOptions({"cpp.simdlen": 1}))


def left_to_eager(operators: Sequence[str]) -> str:
    """Says that eager's kernels compute these operators."""
    return f"{', '.join(operators)} left to eager's kernel{'s' if len(operators) > 1 else ''}"
