"""Sizes are shown in the names of the dimensions, and mean what torch's expressions mean."""

from __future__ import annotations

import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._sympy.functions import FloorDiv, Mod

from exportkit.package import manifest as m
from exportkit.report.symbolic_sizes import expression_text, size_text, symbols_of

S0, S1 = (sympy.Symbol(name, positive=True, integer=True) for name in ("s0", "s1"))
NAMES = {"s0": "batch", "s1": "gh"}

ATOMS = st.one_of(st.sampled_from([S0, S1]), st.integers(-9, 99).map(sympy.Integer))
EXPRESSIONS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda pair: pair[0] + pair[1]),
        st.tuples(inner, inner).map(lambda pair: pair[0] * pair[1]),
        st.tuples(inner, st.integers(1, 9)).map(lambda pair: FloorDiv(pair[0], sympy.Integer(pair[1]))),
        st.tuples(inner, st.integers(2, 9)).map(lambda pair: Mod(pair[0] * pair[0], sympy.Integer(pair[1]))),
        st.tuples(inner, inner).map(lambda pair: sympy.Max(*pair)),
        inner.map(lambda one: one**2),
    ),
    max_leaves=6,
)


@given(EXPRESSIONS, st.integers(1, 50), st.integers(1, 50))
def test_an_expression_means_what_torch_means(expression: sympy.Expr, batch: int, gh: int):
    text = expression_text(sympy.srepr(expression), NAMES)
    numbers = {"batch": sympy.Integer(batch), "gh": sympy.Integer(gh)}
    shown = sympy.sympify(text, locals={"max": sympy.Max, "min": sympy.Min, **numbers})
    assert shown == expression.subs({S0: batch, S1: gh})


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        (16 * S1, "16*gh"),
        (S0 * S1 + 1, "batch*gh+1"),
        (S0 - 1, "batch-1"),
        (2 * (S0 + 1), "2*batch+2"),
        (FloorDiv(S1 + 1, 2), "(gh+1)//2"),
        (FloorDiv(3 * S1 + 1, 2), "(3*gh+1)//2"),
        (3 * FloorDiv(S1, 2), "3*(gh//2)"),
        (-FloorDiv(S1, 2), "-(gh//2)"),
        (S0 * Mod(S1, 3), "batch*(gh%3)"),
        (S0 * S1**2, "batch*gh**2"),
        (sympy.Min(200, S1), "min(200, gh)"),
        (-S0, "-batch"),
    ],
)
def test_expressions_are_short(expression: sympy.Expr, text: str):
    assert expression_text(sympy.srepr(expression), NAMES) == text


@pytest.mark.parametrize(
    "hostile",
    [
        "__import__('os').system('touch owned')",
        "(" * 900,
        "Add(" * 400 + ")" * 400,
        "Symbol(" + "'a'" * 10_000 + ")",
        "[x for x in ().__class__.__bases__]",
        "\x00",
        "",
        "-" * 1900 + "1",
        "Integer({[]: 1})",
    ],
)
def test_what_is_no_expression_is_a_question_mark(hostile: str, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert expression_text(hostile, {}) == "?"
    assert list(tmp_path.iterdir()) == []


def test_sizes_in_other_forms_are_question_marks():
    assert size_text({"as_int": 3}, {}) == "3"
    for other in ({}, {"as_int": "3"}, {"as_expr": 3}, {"as_expr": {"expr_str": 3}}, {"as_expr": {}}):
        assert size_text(other, {}) == "?"


def test_symbols_have_the_names_of_dimensions_where_the_sizes_agree():
    def traced(expression: sympy.Expr) -> dict:
        return {"as_expr": {"expr_str": sympy.srepr(expression)}}

    shape = (m.Size(dimension="batch"), 3, m.Size(dimension="gh", scale=16), m.Size(dimension="n", offset=1))
    call = m.Call(
        parameters=(),
        inputs=(m.TensorInput(name="x", dtype="float32", shape=shape, written=None),),
        result=m.ConstantNode(value=None),
        outputs=(),
        dimensions=(),
    )
    others = sympy.Symbol("u2", integer=True)
    sizes = [traced(S0), {"as_int": 3}, traced(16 * S1), traced(others + 1)]
    assert symbols_of(call, [sizes]) == {"s0": "batch", "s1": "gh", "u2": "n"}
    assert symbols_of(call, [[traced(2 * S0), {"as_int": 3}, traced(16 * S1 + S0), traced(others)]]) == {}
    assert symbols_of(call, []) == symbols_of(call, [[]]) == {}
