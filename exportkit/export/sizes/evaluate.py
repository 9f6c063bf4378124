"""Computes conditions on sizes for many sizes at once."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import sympy
from torch.utils._sympy import functions as torch_functions

_EXACT = 2**62  # above it, 64-bit integers could overflow, and Python's own are used
_SLOW = 3_000  # so many values are computed by sympy itself where this module does not know a function


class NotComputableError(Exception):
    """The expression has a function that cannot be computed for so many values."""


def evaluate(expression: sympy.Basic, columns: Mapping[sympy.Symbol, numpy.ndarray]) -> Any:
    """Computes an expression or a condition for every row of a table.

    Args:
        expression: The expression.
        columns: The values of each symbol, whole numbers.

    Returns:
        The values, or one value for all rows.

    Raises:
        NotComputableError: It has a function that cannot be computed.
    """
    largest = {symbol: int(numpy.abs(column).max(initial=0)) for symbol, column in columns.items()}
    try:
        if _magnitude(expression, largest) >= _EXACT:
            columns = {symbol: column.astype(object) for symbol, column in columns.items()}
        return _value(expression, columns)
    except NotComputableError:
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
        raise NotComputableError(type(expression).__name__)
    return compute(*(_value(arg, columns) for arg in expression.args))


def _by_sympy(expression: sympy.Basic, columns: Mapping[sympy.Symbol, numpy.ndarray]) -> numpy.ndarray:
    """Computes row by row."""
    rows = list(zip(*(column.tolist() for column in columns.values())))
    if len(rows) > _SLOW:
        raise NotComputableError(f"{expression} for {len(rows)} values")
    try:
        found = [expression.xreplace(dict(zip(columns, map(sympy.Integer, row)))) for row in rows]
    except ZeroDivisionError as error:
        raise NotComputableError(f"{expression}: {error}") from error
    if any(each not in (sympy.true, sympy.false) for each in found):
        raise NotComputableError(str(expression))
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
    raise NotComputableError("a power that is no whole number")


def _divided(base: Any, divisor: Any) -> Any:
    if numpy.any(divisor == 0):
        raise NotComputableError("a division by 0")
    return base // divisor


def _rest(base: Any, divisor: Any) -> Any:
    return base - _divided(base, divisor) * divisor


_FUNCTIONS: Mapping[type, Callable[..., Any]] = {
    sympy.Add: _reduced(operator.add),
    sympy.Mul: _reduced(operator.mul),
    sympy.Pow: _raised,
    sympy.Min: _reduced(numpy.minimum),
    sympy.Max: _reduced(numpy.maximum),
    sympy.Mod: _rest,
    sympy.Eq: operator.eq,
    sympy.Ne: operator.ne,
    sympy.Lt: operator.lt,
    sympy.Le: operator.le,
    sympy.Gt: operator.gt,
    sympy.Ge: operator.ge,
    sympy.And: _reduced(numpy.logical_and),
    sympy.Or: _reduced(numpy.logical_or),
    sympy.Not: numpy.logical_not,
    torch_functions.Min: _reduced(numpy.minimum),
    torch_functions.Max: _reduced(numpy.maximum),
    torch_functions.FloorDiv: _divided,
    torch_functions.CleanDiv: _divided,
    torch_functions.Mod: _rest,
    torch_functions.PythonMod: _rest,
    torch_functions.ModularIndexing: lambda base, divisor, modulus: _rest(_divided(base, divisor), modulus),
    torch_functions.PowByNatural: _raised,
    torch_functions.Where: numpy.where,
}
