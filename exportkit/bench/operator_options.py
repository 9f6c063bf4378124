"""The options of `exportkit bench` for operators.

An installed package that has operators to time declares a module in the entry point group `exportkit.bench`. It has two
functions: `operator_names()`, and `bench_operators(device, rate, options, progress)`, which yields a `results.Row` for
each operator and size. `rate()` measures the GB/s of a large copy; `progress` is told each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from exportkit.bench.results import Direction

EAGER, COMPILE, LIBRARY = "eager", "compile", "library"
ALTERNATIVES = (EAGER, COMPILE, LIBRARY)


@dataclass(frozen=True)
class OperatorOptions:
    """The operators and the alternatives to time.

    Attributes:
        names: Operators and chains. Empty: all.
        directions: Forward calls, gradients, or both.
        dtype: A dtype that replaces the table's. None: the table's.
        against: Members of ALTERNATIVES.
        sizes: Time only sizes whose label contains one of these. Empty: all.
        seconds: The time for each alternative of a row.
        seed: The seed of the inputs.
    """

    names: Sequence[str] = ()
    directions: Sequence[Direction] = ("forward", "backward")
    dtype: torch.dtype | None = None
    against: Sequence[str] = ALTERNATIVES
    sizes: Sequence[str] = ()
    seconds: float = 1.0
    seed: int = 0
