"""Tries whether a condition on sizes holds for every size in the declared ranges (docs/adr/0052).

A condition over few sizes is computed for all of them; for more, at the ends, beside them, and for some that are drawn.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import TypeAlias

import numpy
import sympy

from exportkit.export.sizes.evaluate import NotComputableError, evaluate

Ranges: TypeAlias = Mapping[sympy.Symbol, tuple[int, int]]
"""The smallest and the largest value of each symbol."""

_EVERY = 400_000  # so many combinations of sizes are all computed, in some milliseconds
_DRAWN = 4_000  # so many are drawn where all are too many


def holds(condition: sympy.Basic, ranges: Ranges) -> bool:
    """Returns whether a condition holds for all integers of these ranges, or wherever it was tried.

    Args:
        condition: A relation, or several joined by and, or, not.
        ranges: The range of each symbol in it. A symbol without one makes the condition untrue.
    """
    if condition in (sympy.true, sympy.false):
        return bool(condition == sympy.true)
    box = _box(condition, ranges)
    if box is None:
        return False
    try:
        return bool(numpy.all(evaluate(condition, dict(zip(box, _values(box))))))
    except NotComputableError:
        return False


def holds_at(condition: sympy.Basic, values: Mapping[sympy.Symbol, int]) -> bool:
    """Returns whether a condition holds, or may hold, for these values."""
    try:
        return bool(
            condition.xreplace({symbol: sympy.Integer(value) for symbol, value in values.items()}) != sympy.false
        )
    except ZeroDivisionError:  # a condition on a size that is 0 there
        return False


def counterexamples(condition: sympy.Basic, ranges: Ranges) -> list[dict[sympy.Symbol, int]]:
    """Returns the least, the greatest and one of the values for which a condition fails, as far as they were found."""
    box = _box(condition, ranges)
    if not box:
        return []
    columns = _values(box)
    try:
        fails = numpy.flatnonzero(~numpy.asarray(evaluate(condition, dict(zip(box, columns))), dtype=bool))
    except NotComputableError:
        return []
    chosen = (*fails[:1], *fails[-1:], *fails[len(fails) // 3 :][:1])
    rows = dict.fromkeys(tuple(int(column[row]) for column in columns) for row in chosen)
    return [dict(zip(box, row)) for row in rows]


# --- values -----------------------------------------------------------------------------------------------------------


def _box(condition: sympy.Basic, ranges: Ranges) -> Ranges | None:
    """Returns the ranges of the symbols of a condition; None if one has no range."""
    symbols = sorted(condition.free_symbols, key=str)
    return {symbol: ranges[symbol] for symbol in symbols} if all(symbol in ranges for symbol in symbols) else None


def _count(box: Ranges) -> int:
    return math.prod(high - low + 1 for low, high in box.values())


def _values(box: Ranges) -> list[numpy.ndarray]:
    """Returns all values of each symbol, or some if those are too many: a table, by columns."""
    return _every(box) if _count(box) <= _EVERY else _some(box)


def _every(box: Ranges) -> list[numpy.ndarray]:
    """Returns the columns of a table of all combinations."""
    axes = [numpy.arange(low, high + 1, dtype=numpy.int64) for low, high in box.values()]
    return [grid.reshape(-1) for grid in numpy.meshgrid(*axes, indexing="ij")]


def _some(box: Ranges) -> list[numpy.ndarray]:
    """Returns combinations: of the ends and what lies beside them, and drawn, small ones as often as large ones."""
    generator = numpy.random.default_rng(0)
    ends = [sorted({low, min(low + 1, high), max(high - 1, low), high}) for low, high in box.values()]
    corners = numpy.array(list(itertools.islice(itertools.product(*ends), _DRAWN)), dtype=numpy.int64)
    drawn = []
    for low, high in box.values():
        wide = numpy.exp(generator.uniform(0, math.log(high - low + 1), _DRAWN)).astype(numpy.int64) - 1 + low
        even = generator.integers(low, high, _DRAWN, endpoint=True)
        drawn.append(generator.permutation(numpy.concatenate([numpy.minimum(wide, high), even])))
    return [numpy.concatenate([corners[:, i], column]) for i, column in enumerate(drawn)]
