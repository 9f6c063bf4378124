"""What the text of an exported program may be, checked without torch and without evaluating any of it.

torch.export.load trusts a file. It evaluates text of sizes (`expr_str`) with sympy and that of guards (`guards_code`)
with Python, writes names of values into the source of functions, looks operators up among all attributes of torch
(torch.os.system is one), and imports modules that the description of a nested structure names. So each text in the JSON
that torch writes has a rule here, and a text without a rule is refused: a newer torch may evaluate it.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

LONGEST = 100_000  # characters of an expression that is parsed
_MOST_DIGITS = 40  # of a number, because torch may compute powers of it

# What sympy's srepr writes of sizes: functions of sympy, and those that torch adds.
_SIZE_FUNCTIONS = (
    "Symbol Integer Float Rational Add Mul Pow Max Min Mod Abs floor ceiling sqrt log exp And Or Not ITE Eq Ne Lt Le Gt"
    " Ge Equality Unequality StrictLessThan LessThan StrictGreaterThan GreaterThan Piecewise ExprCondPair FloorDiv"
    " ModularIndexing Where PythonMod CleanDiv CeilToInt FloorToInt CeilDiv LShift RShift PowByNatural FloatPow"
    " FloatTrueDiv IntTrueDiv IsNonOverlappingAndDenseIndicator TruncToFloat TruncToInt RoundToInt RoundDecimal ToFloat"
    " Identity"
)
SIZE_FUNCTIONS = frozenset(_SIZE_FUNCTIONS.split())

_SIZE_TEXT = re.compile(r"[\w ().,'\"+\-*/%<>=!&|~]*", re.ASCII)
_GUARD_TEXT = re.compile(r"[\w ().,'+\-*/%<>=!\[\]]*", re.ASCII)
_GUARD_FUNCTIONS = frozenset({"max", "min", "abs", "int", "float", "bool", "round"})
_GUARD_METHODS = frozenset({"size", "stride", "storage_offset"})
_MATH_NAMES = "ceil floor trunc sqrt log log2 exp pow sin cos tan asin acos atan sinh cosh tanh inf nan isnan"
_MATH = frozenset(_MATH_NAMES.split())
_OF_TORCH = frozenset({"sym_max", "sym_min", "sym_float", "_sym_sqrt"})  # from torch 2.15 on
_ARITHMETIC = (
    *(ast.Expression, ast.Constant, ast.Name, ast.Load, ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub),
    *(ast.UAdd, ast.Compare, ast.cmpop, ast.BinOp, ast.operator, ast.Call, ast.IfExp),
)

_NAME = re.compile(r"[^\W\d]\w*")
_PATH = re.compile(r"[^\"'\\\x00-\x1f\x7f]*")  # becomes part of Python source, between quotes
_SYMBOL = re.compile(r"[\w+\-*/%().,\s]*", re.ASCII)
_WORD = re.compile(r"[\w.+\-]*", re.ASCII)
_NUMBER = re.compile(r"NaN|-?Infinity")
_OPERATOR = re.compile(
    # Not an attribute that every Python object has, but the operators that are written alike.
    r"torch\.ops\.(?!_|load_|loaded_|import_)\w+\.(?:__i?(?:and|or|xor|lshift|rshift)__|(?!__)\w+)(?:\.(?!__)\w+)?"
    r"|torch\.ops\.(?:_c10d_functional|_quantized|_native)\.(?!__)\w+(?:\.(?!__)\w+)?"
    r"|_operator\.(?:eq|ne|le|ge|lt|gt|neg|pos|mul|add|sub|floordiv|mod|pow|truediv|and_|or_|lshift|rshift|getitem)"
    r"|math\.(?:trunc|ceil|floor|sqrt)"
    r"|torch\.(?:sym_(?:not|int|float|ite|max|min|sqrt|sum|fresh_size)|_sym_\w+)"
    r"|torch\._functorch\.predispatch\.(?:_\w+|lazy_load_decompositions)",
    re.ASCII,
)
_ON_FILES = re.compile(r"torch\.ops\.(?:aten\.(?:save|from_file)|prim\.\w+)(?:\.\w+)?")
_FACTORIES = frozenset({"dict", "list", "set", "tuple", "int", "float", "str", "bool"})


class GrammarError(ValueError):
    """A text is not one that torch writes."""


def check_program(text: bytes) -> None:
    """Checks the JSON of an exported program.

    Raises:
        GrammarError: torch could execute a part of it, or may do so in a newer version.
    """
    try:
        program = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"it is not JSON: {error}") from error
    try:
        _check(program, "", "")
    except RecursionError as error:
        raise GrammarError("it is nested too deeply") from error


def parse(text: str, longest: int = LONGEST) -> ast.expr:
    """Parses an expression, without evaluating it.

    Raises:
        GrammarError: It is too long, or not an expression.
    """
    if len(text) > longest:
        raise GrammarError(f"it has {len(text)} characters")
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # what hostile text makes the parser raise
        raise GrammarError(str(error)) from error


def check_size(text: str) -> None:
    """Checks the text of a size, such as Mul(Integer(16), Symbol('s0', positive=True, integer=True)).

    Raises:
        GrammarError: It is anything else.
    """
    if not _SIZE_TEXT.fullmatch(text):
        raise GrammarError("it has characters that no size has")
    for node in ast.walk(parse(text)):
        if isinstance(node, ast.keyword):
            _require(isinstance(node.value, ast.Constant), node)
        elif isinstance(node, ast.Call):
            _require(isinstance(node.func, ast.Name) and node.func.id in SIZE_FUNCTIONS, node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            _require(bool(_WORD.fullmatch(node.value)), node)
        else:
            _check_arithmetic(node)


def check_guard(text: str) -> None:
    """Checks the text of a guard, such as L['x'].size()[0] == 2*L['y'].size()[1].

    Raises:
        GrammarError: It is anything else.
    """
    if not _GUARD_TEXT.fullmatch(text):
        raise GrammarError("it has characters that no guard has")
    for node in ast.walk(parse(text)):
        if isinstance(node, ast.Call):
            method = isinstance(node.func, ast.Attribute)
            _require(method or (isinstance(node.func, ast.Name) and node.func.id in _GUARD_FUNCTIONS), node)
        elif isinstance(node, ast.Attribute):
            module = node.value.id if isinstance(node.value, ast.Name) else ""
            _require(node.attr in {"math": _MATH, "torch": _OF_TORCH}.get(module, _GUARD_METHODS), node)
        elif isinstance(node, ast.Subscript):
            _require(isinstance(node.slice, (ast.Constant, ast.UnaryOp)), node)
        else:
            _check_arithmetic(node)


def _check_arithmetic(node: ast.AST) -> None:
    _require(isinstance(node, _ARITHMETIC), node)
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        _require(len(str(node.value)) <= _MOST_DIGITS, node)
    if isinstance(node, ast.Name):
        _require(not node.id.startswith("_"), node)


def _require(allowed: bool, node: ast.AST) -> None:
    if not allowed:
        raise GrammarError(f"{ast.unparse(node)[:80]!r} is no part of one")


# --- the JSON ---------------------------------------------------------------------------------------------------------


def _check(value: Any, key: str, parent: str) -> None:
    """Checks a value and what is in it. A list's elements have its key; `parent` is that of the object around it."""
    if isinstance(value, str):
        _check_text(value, key, parent)
    elif isinstance(value, list):
        for each in value:
            _check(each, key, parent)
    elif isinstance(value, dict):
        for name, each in value.items():
            if key in _KEYS:
                _match(_KEYS[key], name, f"a key of {key}")
            if name in _OBJECTS and each:
                raise GrammarError(f"it has objects that torch unpickles: {name}")
            # The texts of metadata are under names that are free.
            _check(each, key if key == "metadata" else name, key)


def _check_text(text: str, key: str, parent: str) -> None:
    rule = _TEXTS.get(key)
    if rule is None:
        raise GrammarError(f"{key or 'the program'} is a text, which torch did not write there so far")
    if rule is _any and key == "as_string" and parent != "arg":  # an input, which a guard compares with
        rule = _is(_PATH)
    try:
        rule(text)
    except GrammarError as error:
        raise GrammarError(f"{key} is {text[:120]!r}: {error}") from error


def _match(pattern: re.Pattern[str], text: str, what: str = "it") -> None:
    if not pattern.fullmatch(text):
        raise GrammarError(f"{what} is {text[:80]!r}, which torch does not write")


def _is(pattern: re.Pattern[str]) -> Callable[[str], None]:
    return lambda text: _match(pattern, text)


def _check_operator(text: str) -> None:
    if not _OPERATOR.fullmatch(text) or _ON_FILES.fullmatch(text):
        raise GrammarError("it is not an operator on tensors")


def _check_tree(text: str) -> None:
    """Checks the description of a nested structure: JSON, in which the keys of dictionaries are JSON once more."""
    if not text:  # as torch writes that there is none
        return
    try:
        _check_nodes(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise GrammarError(str(error)) from error


def _check_nodes(value: Any) -> None:
    if isinstance(value, Mapping):
        if "__enum__" in value:
            raise GrammarError("it has members of an enumeration, whose module torch would import")
        factory = value.get("default_factory_module"), value.get("default_factory_name")
        if factory != (None, None) and (factory[0] != "builtins" or factory[1] not in _FACTORIES):
            raise GrammarError(f"{factory[0]}.{factory[1]} makes the values of a defaultdict")
        for name, each in value.items():
            if name == "context" and isinstance(each, str):
                _check_nodes(json.loads(each))
            else:
                _check_nodes(each)
    elif isinstance(value, list):
        for each in value:
            _check_nodes(each)


def _texts(rule: Callable[[str], None], keys: str) -> Iterable[tuple[str, Callable[[str], None]]]:
    return ((key, rule) for key in keys.split())


def _optional_name(text: str) -> None:
    if text:
        _match(_NAME, text.lstrip("*"))


def _any(text: str) -> None:
    """Is shown, or is an argument that stands in Python source as its repr."""


# By the key that has a text, or a list of texts, in torch/_export/serde/schema.py.
_TEXTS: Mapping[str, Callable[[str], None]] = dict(
    (
        *_texts(_optional_name, "name as_name forward_arg_names field_names"),
        *_texts(_is(_PATH), "buffer_name parameter_name tensor_constant_name user_input_name fqn"),
        *_texts(_check_operator, "target as_operator"),
        *_texts(check_size, "expr_str"),
        *_texts(check_guard, "guards_code"),
        *_texts(_check_tree, "in_spec out_spec"),
        *_texts(_is(_NUMBER), "as_float as_floats as_float_lists min_val max_val real imag"),
        *_texts(_is(_WORD), "type verifiers torch_version"),
        *_texts(_any, "metadata as_string as_strings"),
    )
)
_KEYS: Mapping[str, re.Pattern[str]] = {
    **dict.fromkeys(("tensor_values", "sym_int_values", "sym_bool_values", "sym_float_values"), _NAME),
    "range_constraints": _SYMBOL,
    "as_string_to_argument": _PATH,
    "treespec_namedtuple_fields": _PATH,
}
_OBJECTS: Collection[str] = {"custom_obj", "as_custom_obj", "custom_obj_values"}
