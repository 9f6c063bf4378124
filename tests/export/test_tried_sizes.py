"""A condition on sizes that follows from declared ranges holds, and one that fails somewhere is found there."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import sympy
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils._sympy.functions import FloorDiv, Max, Min, Mod, ModularIndexing

from exportkit.export.sizes.tried_sizes import Ranges, counterexamples, holds

N, M, B = (sympy.Symbol(name, integer=True, nonnegative=True) for name in "nmb")
SMALL: Ranges = {N: (1, 100), M: (1, 100), B: (1, 8)}
WIDE: Ranges = {N: (1, 2**31 - 1), M: (1, 2**20), B: (1, 64)}

TRUE = [
    sympy.Eq(Min(8 * N + 8, 16 * N + 16), 8 * N + 8),
    sympy.Eq(Min(64 * N, 256 * N), 64 * N),
    sympy.Ne(Min(8 * N + 8, 16 * N + 16), 64 * N + 64),
    32 * N + 4 * (8 * B - 1) * Min(8 * N + 8, 64 * N + 64) + 32 <= 256 * B * (N + 1),
    sympy.Eq(FloorDiv(N, 2) + FloorDiv(N + 1, 2), N),
    sympy.Eq(N - 2 * FloorDiv(N, 2), Mod(N, 2)),
    sympy.Eq(Mod(N + Mod(8 - Mod(N, 8), 8), 8), 0),
    32 * FloorDiv(N + 31, 32) < N + 32,
    sympy.Eq(FloorDiv(6 * M * N, 2 * N), 3 * M),
    sympy.Eq(Min(N, M * N), N),
    sympy.Eq(ModularIndexing(16 * N + 3, 4, 4), 0),
    sympy.And(N >= 1, sympy.Or(N < M, N >= M, sympy.Eq(B, 0))),
    Max(N, M) >= N,
]
UNTRUE = [
    sympy.Eq(Mod(N, 2), 0),
    N >= 2,
    N < 100,
    sympy.Eq(Min(N, M), N),
    sympy.Eq(FloorDiv(N, 2) * 2, N),
    N * B <= 700,
]


@pytest.mark.parametrize("condition", TRUE, ids=str)
@pytest.mark.parametrize("ranges", [SMALL, WIDE], ids=["small", "wide"])
def test_what_follows_from_the_ranges_holds(condition: sympy.Basic, ranges: Ranges) -> None:
    assert holds(condition, ranges)
    assert not counterexamples(condition, ranges)


@pytest.mark.parametrize("condition", UNTRUE, ids=str)
@pytest.mark.parametrize("ranges", [SMALL, WIDE], ids=["small", "wide"])
def test_what_fails_somewhere_is_untrue_there(condition: sympy.Basic, ranges: Ranges) -> None:
    assert not holds(condition, ranges)
    found = counterexamples(condition, ranges)
    assert found
    assert all(condition.xreplace(dict(each)) == sympy.false for each in found)


def test_a_condition_on_a_size_without_a_range_does_not_hold() -> None:
    assert not holds(sympy.Symbol("u0", integer=True) >= 0, SMALL)


def _numbers() -> st.SearchStrategy[sympy.Expr]:
    leaves = st.one_of(st.sampled_from([N, M]), st.integers(0, 9).map(sympy.Integer))

    def grow(inner: st.SearchStrategy[sympy.Expr]) -> st.SearchStrategy[sympy.Expr]:
        two = st.tuples(inner, inner)
        kinds: list[Callable[[sympy.Expr, sympy.Expr], sympy.Expr]] = [
            lambda a, b: a + b,
            lambda a, b: a * b,
            lambda a, b: a - b,
            Min,
            Max,
        ]
        joined = st.builds(lambda kind, pair: kind(*pair), st.sampled_from(kinds), two)
        divided = st.builds(
            lambda kind, base, divisor: kind(base, divisor),
            st.sampled_from([FloorDiv, Mod]),
            inner.filter(lambda base: base.is_nonnegative),
            st.one_of(st.integers(1, 6).map(sympy.Integer), st.just(N + 1)),
        )
        return st.one_of(joined, divided)

    return st.recursive(leaves, grow, max_leaves=6)


@settings(max_examples=150, deadline=None)
@example(Min(Max(N, 2), Max(N, 7)), N, sympy.Eq)
@given(_numbers(), _numbers(), st.sampled_from([sympy.Eq, sympy.Ne, sympy.Le, sympy.Lt]))
def test_it_holds_where_every_size_is_computed_alone(left: sympy.Expr, right: sympy.Expr, kind: type) -> None:
    box: Ranges = {N: (1, 7), M: (2, 6)}
    condition = kind(left, right)
    points = [dict(zip((N, M), map(sympy.Integer, at))) for at in itertools.product(range(1, 8), range(2, 7))]
    assert holds(condition, box) is all(condition.xreplace(point) == sympy.true for point in points)
