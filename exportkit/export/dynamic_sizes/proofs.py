"""Proves that a condition on sizes holds for every size in the declared ranges.

A condition over few sizes is computed for all of them. For more, its pieces are bounded: floor divisions and remainders
by their residues, minima and maxima by the order of their arguments, polynomials by their Bernstein coefficients, whose
least and greatest enclose every value. A range that is too wide for a bound is cut in two. docs/adr/0052 has the rule.
"""

from __future__ import annotations

import enum
import functools
import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, TypeAlias

import numpy
import sympy
from torch.utils._sympy import functions as torch_functions

from exportkit.export.dynamic_sizes.evaluate import NotComputableError, evaluate

Ranges: TypeAlias = Mapping[sympy.Symbol, tuple[int, int]]
"""The smallest and the largest value of each symbol."""

_EVERY = 400_000  # so many combinations of sizes are all computed, in some milliseconds
_DRAWN = 4_000  # so many are drawn where all are too many
_BOXES = 400  # into so many parts the ranges are cut for one condition
_COEFFICIENTS = 4_096

_MIN = (torch_functions.Min, sympy.Min)
_MAX = (torch_functions.Max, sympy.Max)
_FLOOR_DIV = (torch_functions.FloorDiv, torch_functions.CleanDiv)
_MOD = (torch_functions.Mod, torch_functions.PythonMod, sympy.Mod)
_SIGNS: Mapping[type, Callable[[Any, Any], Any]] = {
    sympy.Eq: operator.eq,
    sympy.Ne: operator.ne,
    sympy.Gt: operator.gt,
    sympy.Ge: operator.ge,
    sympy.Lt: operator.lt,
    sympy.Le: operator.le,
}


class Verdict(enum.Enum):
    """What is known of a condition: it holds everywhere, held wherever it was tried, or is wrong somewhere."""

    PROVED = "proved"
    TRIED = "tried"
    UNTRUE = "untrue"


def verdict(condition: sympy.Basic, ranges: Ranges) -> Verdict:
    """Judges a condition over all integers of these ranges.

    Args:
        condition: A relation, or several joined by and, or, not.
        ranges: The range of each symbol in it. A symbol without one makes the condition untrue.
    """
    if condition in (sympy.true, sympy.false):
        return Verdict.PROVED if condition == sympy.true else Verdict.UNTRUE
    box = _box(condition, ranges)
    if box is None:
        return Verdict.UNTRUE
    try:
        if not _holds_at(condition, box, _values(box)):
            return Verdict.UNTRUE
    except NotComputableError:
        return Verdict.UNTRUE
    if _count(box) <= _EVERY or _Prover().proves(condition, box):
        return Verdict.PROVED
    return Verdict.TRIED


def counterexamples(condition: sympy.Basic, ranges: Ranges) -> list[dict[sympy.Symbol, int]]:
    """Returns the least and the greatest of the values for which a condition fails, as far as they were found."""
    box = _box(condition, ranges)
    if not box:
        return []
    columns = _values(box)
    try:
        fails = numpy.flatnonzero(~numpy.asarray(evaluate(condition, dict(zip(box, columns))), dtype=bool))
    except NotComputableError:
        return []
    rows = sorted({tuple(int(column[row]) for column in columns) for row in (*fails[:1], *fails[-1:])})
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


def _holds_at(condition: sympy.Basic, box: Ranges, columns: Sequence[numpy.ndarray]) -> bool:
    return bool(numpy.all(evaluate(condition, dict(zip(box, columns)))))


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


# --- proofs -----------------------------------------------------------------------------------------------------------


class _Prover:
    """Proves one condition, with a limit on the parts that it cuts the ranges into."""

    def __init__(self) -> None:
        self._left = _BOXES

    def proves(self, condition: sympy.Basic, box: Ranges) -> bool:
        """Returns whether the condition holds everywhere in the box; False if that is not known."""
        if any(low > high for low, high in box.values()):
            return True  # nothing is in it
        self._left -= 1
        if self._left < 0:
            return False
        reduced = reduce(condition, box)
        if reduced in (sympy.true, sympy.false):
            return bool(reduced)
        inside = {symbol: ends for symbol, ends in box.items() if symbol in reduced.free_symbols}
        if _count(inside) <= _DRAWN:
            try:
                return _holds_at(reduced, inside, _every(inside))
            except NotComputableError:
                return False
        if split := _by_residue(reduced):
            return all(self.proves(part, other) for part, other in _residues(reduced, inside, *split))
        widest = max(inside, key=lambda symbol: inside[symbol][1] - inside[symbol][0])
        low, high = inside[widest]
        middle = (low + high) // 2
        return all(self.proves(reduced, {**inside, widest: part}) for part in ((low, middle), (middle + 1, high)))


def reduce(expression: sympy.Basic, box: Ranges) -> sympy.Basic:
    """Returns an expression that is equal inside of the box, with less in it. A decided condition becomes a constant.

    Args:
        expression: A number or a condition.
        box: The range of each symbol.
    """
    if not expression.args:
        return expression
    args = [reduce(arg, box) for arg in expression.args]
    if type(expression) in _SIGNS:
        return _relation(type(expression), args[0] - args[1], box)
    if isinstance(expression, (*_MIN, *_MAX)):
        return _extreme(expression.func, args, box, least=isinstance(expression, _MIN))
    if isinstance(expression, (*_FLOOR_DIV, *_MOD)) and (found := _divided(args[0], args[1], box)):
        quotient, rest = found
        return quotient if isinstance(expression, _FLOOR_DIV) else rest
    if isinstance(expression, torch_functions.ModularIndexing):
        base, divisor, modulus = args
        return reduce(torch_functions.Mod(torch_functions.FloorDiv(base, divisor), modulus), box)
    return expression.func(*args)


def _relation(kind: type, difference: sympy.Expr, box: Ranges) -> sympy.Basic:
    """Decides a relation of a difference with 0, as far as the difference's bounds do."""
    difference = sympy.expand(difference)
    if difference.is_Number:
        return sympy.true if _SIGNS[kind](difference, 0) else sympy.false
    if ends := bounds(difference, box):
        always = [_SIGNS[kind](end, 0) for end in ends]
        if kind is sympy.Eq and (ends[0] > 0 or ends[1] < 0):
            return sympy.false
        if kind is sympy.Ne:
            always = [ends[0] > 0 or ends[1] < 0] * 2 if ends[0] != ends[1] else always
        if kind is not sympy.Eq or ends[0] == ends[1]:
            if all(always):
                return sympy.true
            if kind is not sympy.Ne and not any(always):
                return sympy.false
    if kind in (sympy.Le, sympy.Lt):
        difference, kind = sympy.expand(-difference), sympy.Ge if kind is sympy.Le else sympy.Gt
    if kind in (sympy.Ge, sympy.Gt) and _by_arguments(kind, difference, box):
        return sympy.true
    return kind(difference, 0)


def _by_arguments(kind: type, difference: sympy.Expr, box: Ranges) -> bool:
    """Returns whether a difference is at least, or greater than, 0 by what a minimum or maximum in it may be."""
    for part in _opaque(difference):
        if not isinstance(part, (*_MIN, *_MAX)):
            continue
        factor = difference.coeff(part)
        ends = bounds(factor, box) if difference == sympy.expand(factor * part + difference.coeff(part, 0)) else None
        if ends is None or ends[0] < 0 < ends[1]:
            continue
        # A maximum is at least each of its arguments, so any of them will do; elsewhere all must.
        enough = any if isinstance(part, _MAX) == (ends[0] >= 0) else all
        if enough(_relation(kind, difference.xreplace({part: arg}), box) == sympy.true for arg in part.args):
            return True
    return False


def _extreme(kind: type, args: Sequence[sympy.Expr], box: Ranges, *, least: bool) -> sympy.Expr:
    """Leaves out what another argument of a minimum or maximum is never greater, or less, than."""
    kept = list(dict.fromkeys(args))
    for arg in list(kept):
        for other in kept:
            ends = bounds(sympy.expand(arg - other if least else other - arg), box) if other != arg else None
            if ends and ends[0] >= 0:
                kept.remove(arg)
                break
    return kept[0] if len(kept) == 1 else kind(*kept)


def _divided(base: sympy.Expr, divisor: sympy.Expr, box: Ranges) -> tuple[sympy.Expr, sympy.Expr] | None:
    """Returns quotient and rest of a division that rounds down, if the quotient is a polynomial in the box."""
    limits = bounds(divisor, box)
    if not limits or limits[0] <= 0 or _opaque(base) or _opaque(divisor):
        return None
    symbols = sorted(base.free_symbols | divisor.free_symbols, key=str)
    if divisor.is_Integer:
        terms = [(sympy.Mul(*powers), factor) for powers, factor in _terms(base, symbols)]
        if any(not factor.is_Integer for _, factor in terms):
            return None
        quotient = sympy.Add(*(power * (factor // divisor) for power, factor in terms))
    elif symbols:
        quotient, _ = sympy.div(sympy.Poly(base, *symbols), sympy.Poly(divisor, *symbols))
        quotient = quotient.as_expr()
        if any(not factor.is_Integer for _, factor in _terms(quotient, symbols)):
            return None
    rest = sympy.expand(base - quotient * divisor)
    if divisor.is_Integer and (ends := bounds(rest, box)) and ends[0] // divisor == ends[1] // divisor:
        more = sympy.Integer(ends[0] // divisor)
        return quotient + more, rest - more * divisor
    above, below = bounds(rest, box), bounds(sympy.expand(divisor - rest), box)
    return (quotient, rest) if above and below and above[0] >= 0 and below[0] > 0 else None


def _by_residue(expression: sympy.Basic) -> tuple[sympy.Symbol, int] | None:
    """Returns a symbol and the divisor by whose residues a division inside of the expression becomes a polynomial."""
    for atom in sorted(expression.atoms(*_FLOOR_DIV, *_MOD), key=sympy.count_ops):
        base, divisor = atom.args
        if divisor.is_Integer and 1 < divisor <= _BOXES and not _opaque(base):
            for powers, factor in _terms(base, sorted(base.free_symbols, key=str)):
                if factor.is_Integer and factor % divisor and powers:
                    return powers[0].as_base_exp()[0], int(divisor)
    return None


def _residues(
    expression: sympy.Basic, box: Ranges, symbol: sympy.Symbol, divisor: int
) -> list[tuple[sympy.Basic, Ranges]]:
    """Returns the expression and its box for each residue of a symbol: with divisor * symbol + residue in its place."""
    low, high = box[symbol]
    return [
        (
            expression.xreplace({symbol: divisor * symbol + residue}),
            {**box, symbol: (-((residue - low) // divisor), (high - residue) // divisor)},
        )
        for residue in range(divisor)
    ]


# --- bounds -----------------------------------------------------------------------------------------------------------


def bounds(expression: sympy.Expr, box: Ranges) -> tuple[Fraction, Fraction] | None:
    """Returns numbers between which the expression lies everywhere in the box; None if none are known.

    Args:
        expression: A number.
        box: The range of each symbol.
    """
    ends: dict[sympy.Symbol, tuple[Fraction, Fraction]] = {}
    replaced: dict[sympy.Basic, sympy.Symbol] = {}
    for part in _opaque(expression):
        inner = _bounds_of_part(part, box)
        if inner is None:
            return None
        replaced[part] = sympy.Dummy(integer=True)
        ends[replaced[part]] = inner
    polynomial = sympy.expand(expression.xreplace(replaced))
    ends |= {s: (Fraction(box[s][0]), Fraction(box[s][1])) for s in polynomial.free_symbols if s in box}
    symbols = sorted(polynomial.free_symbols, key=str)
    if any(symbol not in ends for symbol in symbols):
        return None
    return _bernstein(polynomial, symbols, [ends[symbol] for symbol in symbols])


def _bounds_of_part(part: sympy.Expr, box: Ranges) -> tuple[Fraction, Fraction] | None:
    """Returns the bounds of what is no polynomial: from those of its arguments."""
    inner = [bounds(arg, box) for arg in part.args]
    if any(each is None for each in inner):
        return None
    pairs = [each for each in inner if each is not None]
    if isinstance(part, (*_MIN, *_MAX)):
        pick = min if isinstance(part, _MIN) else max
        return pick(low for low, _ in pairs), pick(high for _, high in pairs)
    if not isinstance(part, (*_FLOOR_DIV, *_MOD)):
        return None
    base, divisor = pairs
    if divisor[0] <= 0:
        return None
    if isinstance(part, _FLOOR_DIV):
        corners = [Fraction(x // y) for x in base for y in divisor]
        return min(corners), max(corners)
    return Fraction(0), divisor[1] - 1


def _bernstein(
    polynomial: sympy.Expr, symbols: Sequence[sympy.Symbol], ends: Sequence[tuple[Fraction, Fraction]]
) -> tuple[Fraction, Fraction] | None:
    """Returns the least and the greatest Bernstein coefficient of a polynomial over a box."""
    if not symbols:
        if not polynomial.is_Rational:
            return None
        return Fraction(int(polynomial.p), int(polynomial.q)), Fraction(int(polynomial.p), int(polynomial.q))
    terms = sympy.Poly(polynomial, *symbols).terms()
    degrees = [max(powers[i] for powers, _ in terms) for i in range(len(symbols))]
    if math.prod(degree + 1 for degree in degrees) > _COEFFICIENTS or any(not f.is_Rational for _, f in terms):
        return None
    table = numpy.full([degree + 1 for degree in degrees], Fraction(0), dtype=object)
    for powers, factor in terms:
        table[powers] = Fraction(int(factor.p), int(factor.q))
    for axis, (degree, (low, high)) in enumerate(zip(degrees, ends)):
        table = numpy.moveaxis(numpy.tensordot(_to_bernstein(degree, low, high), table, axes=(1, axis)), 0, axis)
    flat = list(table.reshape(-1))
    return min(flat), max(flat)


@functools.lru_cache(1024)
def _to_bernstein(degree: int, low: Fraction, high: Fraction) -> numpy.ndarray:
    """Returns the matrix that turns coefficients of powers into Bernstein's, over the range of one symbol."""
    places = range(degree + 1)
    shift = [
        [math.comb(j, k) * low ** (j - k) * (high - low) ** k if j >= k else Fraction(0) for j in places]
        for k in places
    ]
    change = [
        [Fraction(math.comb(k, j), math.comb(degree, j)) if j <= k else Fraction(0) for j in places] for k in places
    ]
    return numpy.dot(numpy.array(change, dtype=object), numpy.array(shift, dtype=object))


def _opaque(expression: sympy.Basic) -> list[sympy.Basic]:
    """Returns the outermost parts of an expression that are no polynomials."""
    if isinstance(expression, (sympy.Add, sympy.Mul)):
        return list(dict.fromkeys(part for arg in expression.args for part in _opaque(arg)))
    if isinstance(expression, sympy.Pow) and expression.exp.is_Integer and expression.exp >= 0:
        return _opaque(expression.base)
    return [expression] if expression.args else []


def _terms(expression: sympy.Expr, symbols: Sequence[sympy.Symbol]) -> list[tuple[list[sympy.Expr], sympy.Expr]]:
    """Returns the powers and the factor of each term of a polynomial."""
    if not symbols:
        return [([], expression)]
    return [
        ([symbol**power for symbol, power in zip(symbols, powers) if power], factor)
        for powers, factor in sympy.Poly(expression, *symbols).terms()
    ]
