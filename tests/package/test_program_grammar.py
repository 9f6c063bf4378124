"""The text of an exported program: what torch writes passes, and nothing else does."""

from __future__ import annotations

import pytest

from exportkit.package.program_grammar import GrammarError, check_guard, check_size


@pytest.mark.parametrize(
    "text",
    [
        "Symbol('s0', positive=True, integer=True)",
        "Add(Mul(Integer(16), Symbol('s0', positive=True, integer=True)), Integer(-1))",
        "FloorDiv(Symbol('s77'), Integer(8))",
        "And(StrictLessThan(Symbol('u0'), Integer(3)), Not(Equality(Symbol('u0'), oo)))",
    ],
)
def test_sizes_that_torch_writes_pass(text: str) -> None:
    check_size(text)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')",
        "Symbol('s0').__class__",
        "Symbol('__import__(1)')",
        "Symbol(name='s0', key=open('x'))",
        "sympify('1')",
        "Integer.mro()",
        "[1 for x in (1,)]",
        "lambda: 1",
        "(Integer)(3)()",
        f"Pow(Integer(9), Integer({'9' * 50}))",
        "Symbol('s0'",
        "(" * 5000,
    ],
)
def test_other_text_of_sizes_is_refused(text: str) -> None:
    with pytest.raises(GrammarError):
        check_size(text)


@pytest.mark.parametrize(
    "text",
    [
        "L['x'].size()[0] == 2*L['y'].size()[1]",
        "max(1, L['x'].size()[3] // 8) <= 5 or not math.isnan(L['x'])",
        "L['args'][0].size()[0] % 2 == 0",
    ],
)
def test_guards_that_torch_writes_pass(text: str) -> None:
    check_guard(text)


@pytest.mark.parametrize(
    "text",
    [
        "open('x')",
        "L['x'].data",
        "max.__self__.exec('1')",
        "math.__loader__",
        "L[__import__('os')]",
        "'' == 1, exec('1')",
        'L["x"] == 1',
        "L['x\\'] == 1",
        "(lambda: 1)()",
        "getattr(L, 'x')",
    ],
)
def test_other_guards_are_refused(text: str) -> None:
    with pytest.raises(GrammarError):
        check_guard(text)
