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
    """The operators and chains to time at the sizes whose label has one of `sizes`. Empty: all.

    A dtype replaces the table's. The seconds are those of each alternative of a row.
    """

    names: Sequence[str] = ()
    directions: Sequence[Direction] = ("forward", "backward")
    dtype: torch.dtype | None = None
    against: Sequence[str] = ALTERNATIVES
    sizes: Sequence[str] = ()
    seconds: float = 1.0
    seed: int = 0
