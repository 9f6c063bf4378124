"""How a check is written: a function of one call, or of the operator, that returns what is wrong with it."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from exportkit.operators.contract.findings import Severity
from exportkit.operators.contract.memory_layouts import PLAIN, MemoryLayout
from exportkit.operators.contract.operator_trial import Trial
from exportkit.operators.contract.sample import Sample

Dtypes = Literal["all", "some", "first", "float64"]
OfCall = Callable[[Trial, Sample], "Problem | None"]
OfOperator = Callable[[Trial], "Problem | None"]


@dataclass(frozen=True)
class Problem:
    """What a check says of one call.

    Attributes:
        message: What was promised and what was seen, in a sentence.
        hint: What to change, where the check's own hint does not fit.
        severity: How bad it is.
        shown: The code that shows it, where the plain call does not. `{call}` in it becomes the call, `{op}` the
            operator. `*args` in it are the arguments, which are then assigned first.
        call: The call that shows it, in a check of the operator.
        layout: How the call's tensors lie in memory.
        number: Which of the tensors lies so. None: all.
    """

    message: str
    hint: str | None = None
    severity: Severity = Severity.broken
    shown: str = "{call}"
    call: Sample | None = None
    layout: MemoryLayout = PLAIN
    number: int | None = None


@dataclass(frozen=True)
class ContractCheck:
    """A promise that operators are held to.

    Attributes:
        name: Its name in reports, such as "fake-shape".
        hint: What to change where it does not hold.
        order: Smaller ones run first.
        of_call: What is asked of each call, or
        of_operator: what is asked of the operator as a whole.
        dtypes: In which dtypes calls are tried: all; "first", that of the first call; "some", all calls in the first
            dtype and a few in each other; or "float64".
        most: How many calls are tried at most, spread evenly from the smallest to the largest. None: all.
        unless: Checks that run before. If one of them finds something, this one would find the same again.
        other_sizes: Whether calls at sizes that the subject does not list are tried, too.
    """

    name: str
    hint: str
    order: int
    of_call: OfCall | None = None
    of_operator: OfOperator | None = None
    dtypes: Dtypes = "all"
    most: int | None = None
    other_sizes: bool = False
    unless: tuple[str, ...] = ()


def of_call(
    name: str,
    hint: str,
    *,
    order: int = 50,
    dtypes: Dtypes = "all",
    most: int | None = None,
    other_sizes: bool = False,
    unless: tuple[str, ...] = (),
) -> Callable[[OfCall], OfCall]:
    """Makes a function of one call a check. See `ContractCheck`."""

    def define(function: OfCall) -> OfCall:
        check = ContractCheck(
            name, hint, order, function, dtypes=dtypes, most=most, other_sizes=other_sizes, unless=unless
        )
        _CHECKS.append(check)
        return function

    return define


def of_operator(
    name: str, hint: str, *, order: int = 50, unless: tuple[str, ...] = ()
) -> Callable[[OfOperator], OfOperator]:
    """Makes a function of the operator a check. See `ContractCheck`."""

    def define(function: OfOperator) -> OfOperator:
        _CHECKS.append(ContractCheck(name, hint, order, of_operator=function, unless=unless))
        return function

    return define


_CHECKS: list[ContractCheck] = []


@functools.cache
def checks() -> dict[str, ContractCheck]:
    """Returns every check by name, in the order in which they run.

    A check is any function in a module `exportkit/operators/contract/check_*.py` with one of the decorators above.
    """
    import exportkit.operators.contract as package

    for module in pkgutil.iter_modules(package.__path__):
        if module.name.startswith("check_"):
            importlib.import_module(f"{package.__name__}.{module.name}")
    return {check.name: check for check in sorted(_CHECKS, key=lambda check: (check.order, check.name))}
