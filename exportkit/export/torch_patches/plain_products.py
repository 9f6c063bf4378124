"""Lets torch take products of sizes for as simple as they can be."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import sympy
from sympy.core.function import Application

from exportkit.export.torch_patches.patched import patched


def plain_products() -> AbstractContextManager[None]:
    """Leaves out SymPy's `simplify` for products of numbers, names and functions of them, while the block runs.

    It would change nothing. But its first call imports SymPy's physical units, and takes 0.15 seconds.
    """
    return patched("sympy.simplify", _unless_plain)


def _unless_plain(simplify: Callable[..., Any]) -> Callable[..., Any]:
    def simplified(expression: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(expression, sympy.Expr) and _is_plain(expression):
            return expression
        return simplify(expression, *args, **kwargs)

    return simplified


def _is_plain(expression: sympy.Expr) -> bool:
    return all(
        factor.is_Symbol or factor.is_Integer or (isinstance(factor, Application) and all(map(_is_plain, factor.args)))
        for factor in sympy.Mul.make_args(expression)
    )
