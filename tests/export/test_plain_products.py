"""Products of sizes are left as they are while torch traces: SymPy's `simplify` finds nothing to change in them."""

from __future__ import annotations

import pytest
import sympy
from torch.utils._sympy.functions import FloorDiv, Max, Mod

from exportkit.export.torch_patches.plain_products import plain_products

A, B = (sympy.Symbol(name, positive=True, integer=True) for name in "ab")
PLAIN = [
    sympy.Integer(4),
    A,
    3 * A * B,
    8 * FloorDiv(A, 16) * FloorDiv(B, 16),
    2 * Max(A, B),
    Mod(A, 8),
    FloorDiv(A, FloorDiv(A, 16)),
]
OTHERS = [A * B + A, A**2 * B, A / B, FloorDiv(A * B + A, 4), sympy.Max(A + 1, B + 1) - 1]


@pytest.mark.parametrize("product", PLAIN, ids=str)
def test_a_plain_product_is_what_simplify_makes_of_it(product: sympy.Expr) -> None:
    simplified = sympy.simplify(product)
    with plain_products():
        assert sympy.simplify(product) is product
    assert simplified == product


@pytest.mark.parametrize("other", [*OTHERS, sympy.Eq(A, B), A < B], ids=str)
def test_all_else_is_simplified(other: sympy.Basic) -> None:
    seen = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sympy, "simplify", lambda expression: seen.append(expression) or expression)
        with plain_products():
            sympy.simplify(other)
    assert seen == [other]
