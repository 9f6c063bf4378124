"""How a check is written: a function of one call, or of the operator, that returns what is wrong with it."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from exportkit.operators.contract.findings import Severity
from exportkit.operators.contract.memory_layouts import PLAIN, MemoryLayout
from exportkit.operators.contract.sample import Sample

Dtypes = Literal["all", "some", "first", "float64"]
Function = TypeVar("Function", bound=Callable[..., "Problem | None"])


@dataclass(frozen=True)
class Problem:
    """What a check says of one call: what was promised and what was seen, in a sentence.

    Its hint replaces the check's. `shown` is the code that shows it, where the plain call does not. `{call}` in it
    becomes the call, `{op}` the operator; `*args` are the arguments, which are then assigned first. `call` is for a
    check of the operator. The call's tensors lie in memory as `layout` says, or only tensor `number` of them.
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
    """A promise that operators are held to. As a decorator it takes the function that checks it.

    Attributes:
        name: Its name in reports, such as "fake-shape".
        hint: What to change where it does not hold.
        order: Smaller ones run first. But for 0, calls are tried that have an answer.
        whole: Whether the function is asked once, (trial) -> problem, or of each call, (trial, call) -> problem.
        dtypes: In which dtypes calls are tried: all; "first", that of the first call; "some", all calls in the first
            dtype and a few in each other; or "float64".
        most: How many calls are tried at most, spread evenly from the smallest to the largest. None: all.
        unless: Checks that run before. If one of them finds something, this one would find the same again.
        other_sizes: Whether calls at sizes that the subject does not list are tried, too.
        function: Returns what is wrong, or None. It raises NotApplicable where it has nothing to check.
    """

    name: str
    hint: str
    order: int = 50
    whole: bool = False
    dtypes: Dtypes = "all"
    most: int | None = None
    other_sizes: bool = False
    unless: tuple[str, ...] = ()
    function: Callable[..., Problem | None] = lambda *_: None

    def __call__(self, function: Function) -> Function:
        """Makes a function the check's."""
        _CHECKS.append(replace(self, function=function))
        return function


_CHECKS: list[ContractCheck] = []


@functools.cache
def checks() -> dict[str, ContractCheck]:
    """Returns every check by name, in the order in which they run.

    They are the functions in `exportkit/operators/contract/check_*.py` that are decorated with a ContractCheck.
    """
    import exportkit.operators.contract as package

    for module in pkgutil.iter_modules(package.__path__):
        if module.name.startswith("check_"):
            importlib.import_module(f"{package.__name__}.{module.name}")
    return {check.name: check for check in sorted(_CHECKS, key=lambda check: (check.order, check.name))}
