"""Tries whether a condition on sizes holds for every size in the declared ranges (docs/adr/0052).

A condition over few sizes is computed for all of them at once; for more, at the ends, beside them, and for some that
are drawn.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import numpy
import sympy
from torch.utils._sympy import functions as torch_functions

Ranges: TypeAlias = Mapping[sympy.Symbol, tuple[int, int]]
"""The smallest and the largest value of each symbol."""

_EVERY = 400_000  # so many combinations of sizes are all computed, in some milliseconds
_DRAWN = 4_000  # so many are drawn where all are too many


def holds(condition: sympy.Basic, ranges: Ranges) -> bool:
    """Returns whether a condition holds for all integers of these ranges, or wherever it was tried.

    A symbol without a range makes the condition untrue.
    """
    if condition in (sympy.true, sympy.false):
        return bool(condition == sympy.true)
    if (box := _box(condition, ranges)) is None:
        return False
    try:
        return bool(numpy.all(_evaluate(condition, dict(zip(box, _values(box))))))
    except _NotComputableError:
        return False


def holds_at(condition: sympy.Basic, values: Mapping[sympy.Symbol, int]) -> bool:
    """Returns whether a condition holds, or may hold, for these values."""
    try:
        return bool(
            condition.xreplace({symbol: sympy.Integer(value) for symbol, value in values.items()}) != sympy.false
        )
    except ZeroDivisionError:  # a condition on a size that is 0 there
        return False


def allowed(conditions: Iterable[sympy.Basic], values: numpy.ndarray) -> numpy.ndarray:
    """Returns at which values of the one symbol in conditions all of them hold, as truths; those not computable do."""
    found = numpy.ones(len(values), dtype=bool)
    for condition in conditions:
        with contextlib.suppress(_NotComputableError):
            found &= numpy.asarray(_evaluate(condition, dict.fromkeys(condition.free_symbols, values)), dtype=bool)
    return found


def counterexamples(condition: sympy.Basic, ranges: Ranges) -> list[dict[sympy.Symbol, int]]:
    """Returns the least, the greatest and one of the values for which a condition fails, as far as they were found."""
    box = _box(condition, ranges)
    if not box:
        return []
    columns = _values(box)
    try:
        fails = numpy.flatnonzero(~numpy.asarray(_evaluate(condition, dict(zip(box, columns))), dtype=bool))
    except _NotComputableError:
        return []
    chosen = (*fails[:1], *fails[-1:], *fails[len(fails) // 3 :][:1])
    rows = dict.fromkeys(tuple(int(column[row]) for column in columns) for row in chosen)
    return [dict(zip(box, row)) for row in rows]


# --- values -----------------------------------------------------------------------------------------------------------


def _box(condition: sympy.Basic, ranges: Ranges) -> Ranges | None:
    """Returns the ranges of the symbols of a condition; None if one has no range."""
    symbols = sorted(condition.free_symbols, key=str)
    return {symbol: ranges[symbol] for symbol in symbols} if all(symbol in ranges for symbol in symbols) else None


def _values(box: Ranges) -> list[numpy.ndarray]:
    """Returns all values of each symbol, or some if those are too many: a table, by columns."""
    return _every(box) if math.prod(high - low + 1 for low, high in box.values()) <= _EVERY else _some(box)


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


_EXACT = 2**62  # above it, 64-bit integers could overflow, and Python's own are used
_SLOW = 3_000  # so many values are computed by sympy itself where this module does not know a function


class _NotComputableError(Exception):
    """The expression has a function that cannot be computed for so many values."""


def _evaluate(expression: sympy.Basic, columns: Mapping[sympy.Symbol, numpy.ndarray]) -> Any:
    """Computes an expression or a condition for every row of a table."""
    largest = {symbol: int(numpy.abs(column).max(initial=0)) for symbol, column in columns.items()}
    try:
        if _magnitude(expression, largest) >= _EXACT:
            columns = {symbol: column.astype(object) for symbol, column in columns.items()}
        return _value(expression, columns)
    except _NotComputableError:
        return _by_sympy(expression, columns)


def _value(expression: sympy.Basic, columns: Mapping[sympy.Symbol, numpy.ndarray]) -> Any:
    if expression.is_Symbol:
        return columns[expression]
    if expression.is_Integer:
        return int(expression)
    if expression in (sympy.true, sympy.false):
        return bool(expression)
    compute = _FUNCTIONS.get(type(expression))
    if compute is None:
        raise _NotComputableError(type(expression).__name__)
    return compute(*(_value(arg, columns) for arg in expression.args))


def _by_sympy(expression: sympy.Basic, columns: Mapping[sympy.Symbol, numpy.ndarray]) -> numpy.ndarray:
    """Computes row by row."""
    rows = list(zip(*(column.tolist() for column in columns.values())))
    if len(rows) > _SLOW:
        raise _NotComputableError(f"{expression} for {len(rows)} values")
    try:
        found = [expression.xreplace(dict(zip(columns, map(sympy.Integer, row)))) for row in rows]
    except ZeroDivisionError as error:
        raise _NotComputableError(f"{expression}: {error}") from error
    if any(each not in (sympy.true, sympy.false) for each in found):
        raise _NotComputableError(str(expression))
    return numpy.array([bool(each) for each in found])


def _magnitude(expression: sympy.Basic, largest: Mapping[sympy.Symbol, int]) -> int:
    """Returns a number that no value inside of the expression is greater than, signs aside."""
    if expression.is_Symbol:
        return largest[expression]
    if expression.is_Integer:
        return abs(int(expression))
    inner = [_magnitude(arg, largest) for arg in expression.args]
    if isinstance(expression, (sympy.Mul, sympy.Pow)):
        return functools.reduce(operator.mul, inner, 1) if isinstance(expression, sympy.Mul) else _power(*inner)
    return sum(inner, 1)


def _power(base: int, exponent: int) -> int:
    return int(base**exponent) if exponent < 64 else _EXACT


def _reduced(compute: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    return lambda *values: functools.reduce(compute, values)


def _raised(base: Any, exponent: Any) -> Any:
    if isinstance(exponent, int) and exponent >= 0:
        return base**exponent
    raise _NotComputableError("a power that is no whole number")


def _divided(base: Any, divisor: Any) -> Any:
    if numpy.any(divisor == 0):
        raise _NotComputableError("a division by 0")
    return base // divisor


def _rest(base: Any, divisor: Any) -> Any:
    return base - _divided(base, divisor) * divisor


_FUNCTIONS: Mapping[type, Callable[..., Any]] = {
    sympy.Add: _reduced(operator.add),
    sympy.Mul: _reduced(operator.mul),
    **dict.fromkeys((sympy.Pow, torch_functions.PowByNatural), _raised),
    **dict.fromkeys((sympy.Min, torch_functions.Min), _reduced(numpy.minimum)),
    **dict.fromkeys((sympy.Max, torch_functions.Max), _reduced(numpy.maximum)),
    **dict.fromkeys((sympy.Mod, torch_functions.Mod, torch_functions.PythonMod), _rest),
    **dict.fromkeys((torch_functions.FloorDiv, torch_functions.CleanDiv), _divided),
    **{getattr(sympy, name): getattr(operator, name.lower()) for name in ("Eq", "Ne", "Lt", "Le", "Gt", "Ge")},
    sympy.And: _reduced(numpy.logical_and),
    sympy.Or: _reduced(numpy.logical_or),
    sympy.Not: numpy.logical_not,
    torch_functions.ModularIndexing: lambda base, divisor, modulus: _rest(_divided(base, divisor), modulus),
    torch_functions.Where: numpy.where,
}
