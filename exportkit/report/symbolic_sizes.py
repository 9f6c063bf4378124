"""Shows the sizes of a program in the dimensions' names: `16*gh` for Mul(Integer(16), Symbol('s68', ...))."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any

from exportkit.package.manifest import Call, Size

_LONGEST = 2000  # characters of an expression that is parsed
_BINARY = {"FloorDiv": ("//", 2), "CleanDiv": ("/", 2), "Mod": ("%", 2), "PythonMod": ("%", 2), "Pow": ("**", 4)}
_RELATIONS = {"Equality": "==", "Unequality": "!=", "LessThan": "<=", "GreaterThan": ">="}
_RELATIONS |= {"StrictLessThan": "<", "StrictGreaterThan": ">"}
_SUM, _PRODUCT, _SIGN, _ATOM = 1, 2, 3, 5

Symbols = Mapping[str, str]  # the names of dimensions by torch's names


def size_text(size: Mapping[str, Any], symbols: Symbols) -> str:
    """Returns a size of a program, {"as_int": 3} or {"as_expr": {"expr_str": ...}}, as text; else `?`."""
    if isinstance(size.get("as_int"), int):
        return str(size["as_int"])
    expression = size.get("as_expr")
    text = expression.get("expr_str") if isinstance(expression, dict) else None
    return expression_text(text, symbols) if isinstance(text, str) else "?"


def expression_text(text: str, symbols: Symbols) -> str:
    """Returns an expression, as sympy's srepr writes it, in usual notation; `?` if it is too long or none."""
    try:
        return _shown(_parsed(text), symbols)[0]
    except (ValueError, RecursionError):
        return "?"


def symbols_of(call: Call, inputs: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, str]:
    """Returns the names of a call's dimensions by torch's symbols, as the sizes of the program's inputs tell.

    Args:
        call: The call.
        inputs: The sizes of the program's inputs, in the call's order.
    """
    found: dict[str, str] = {}
    for described, sizes in zip(call.inputs, inputs):
        for size, traced in zip(described.shape, sizes):
            if isinstance(size, Size) and (symbol := _symbol_of(size, traced)) is not None:
                found.setdefault(symbol, size.dimension)
    return found


def _symbol_of(size: Size, traced: Mapping[str, Any]) -> str | None:
    """Returns the one symbol of a traced size, if it is the same multiple of it."""
    expression = traced.get("as_expr")
    text = expression.get("expr_str") if isinstance(expression, dict) else None
    if not isinstance(text, str):
        return None
    try:
        names = {
            node.args[0].value
            for node in ast.walk(_parsed(text))
            if isinstance(node, ast.Call) and _function(node) == "Symbol" and isinstance(node.args[0], ast.Constant)
        }
    except (ValueError, IndexError):
        return None
    if len(names) != 1 or not isinstance(name := names.pop(), str):
        return None
    return name if size_text(traced, {name: size.dimension}) == str(size) else None


def _parsed(text: str) -> ast.expr:
    """Parses the text of an untrusted file, which is not evaluated.

    Raises:
        ValueError: It is too long, or no expression.
    """
    if len(text) > _LONGEST:
        raise ValueError(f"it has {len(text)} characters")
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(str(error)) from error


def _function(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else ""


def _shown(node: ast.expr, symbols: Symbols) -> tuple[str, int]:
    """Returns an expression, and how strongly its outermost operator binds.

    Raises:
        ValueError: It is not what srepr writes.
    """
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return f"-{_within(node.operand, symbols, _SIGN)}", _SIGN
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return str(node.value), _ATOM
    if isinstance(node, ast.Name):
        return node.id, _ATOM
    if not isinstance(node, ast.Call) or not (name := _function(node)):
        raise ValueError(ast.dump(node)[:80])
    arguments = node.args
    if name == "Symbol" and arguments and isinstance(arguments[0], ast.Constant):
        symbol = str(arguments[0].value)
        return symbols.get(symbol, symbol), _ATOM
    if name in ("Integer", "Float") and arguments:
        if isinstance(arguments[0], ast.Constant):
            text = str(arguments[0].value)
            return text, _SIGN if text.startswith("-") else _ATOM
        return _shown(arguments[0], symbols)
    if name == "Rational" and len(arguments) == 2:
        return f"{_within(arguments[0], symbols, _SIGN)}/{_within(arguments[1], symbols, _ATOM)}", _PRODUCT
    if name == "Add" and arguments:
        return _sum(arguments, symbols), _SUM
    if name == "Mul" and arguments:
        first, *others = arguments  # 3*(gh//2) is not 3*gh//2
        factors = [_within(first, symbols, _PRODUCT), *(_within(each, symbols, _SIGN) for each in others)]
        return "-" * (factors[0] == "-1") + "*".join(factors[factors[0] == "-1" :]), _PRODUCT
    if name in _BINARY and len(arguments) == 2:
        sign, strength = _BINARY[name]
        left, right = (_within(each, symbols, strength + n) for n, each in enumerate(arguments))
        return f"{left}{sign}{right}", strength
    if name in _RELATIONS and len(arguments) == 2:
        left, right = (_shown(each, symbols)[0] for each in arguments)
        return f"{left} {_RELATIONS[name]} {right}", 0
    return f"{name.lower()}({', '.join(_shown(each, symbols)[0] for each in arguments)})", _ATOM


def _sum(terms: Sequence[ast.expr], symbols: Symbols) -> str:
    """Numbers come last: `gh*gw+1`."""
    shown = [_within(each, symbols, _SUM) for each in terms]
    shown.sort(key=lambda text: text.lstrip("-").isdecimal())
    return shown[0] + "".join(text if text.startswith("-") else f"+{text}" for text in shown[1:])


def _within(node: ast.expr, symbols: Symbols, strength: int) -> str:
    text, own = _shown(node, symbols)
    return text if own >= strength else f"({text})"
