"""Reads what the command line says of sizes, inputs and dtypes. Does not import torch, so that a slip is said at once.

A text that cannot be read is refused with the one that was probably meant, if that one can be read.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable

from exportkit.errors import ExportkitError, UsageError
from exportkit.package.dtypes import DTYPES
from exportkit.package.manifest import Size

_NAME = "[A-Za-z_][A-Za-z0-9_]{0,63}"
_EXPRESSION = re.compile(
    rf"(?:(?P<scale>[0-9]+)\*)?(?P<name>{_NAME})(?:(?P<sign>[+-])(?P<offset>[0-9]+))?"
    r"(?:\[(?P<min>[0-9]+):(?P<max>[0-9]+)\])?"
)
_PLACE = re.compile(r"(?P<tensor>[^:=]+):(?P<dim>[0-9]+)=(?P<expression>.+)")
_RANGE = re.compile(rf"(?P<name>{_NAME})=(?P<min>[0-9]+):(?P<max>[0-9]+)")
_INPUT = re.compile(r"(?P<name>[^=]+)=(?P<dtype>[a-z0-9_]+)\[(?P<sizes>[0-9,\s]*)\]")
_FORM = "NAME:DIM=NAME[MIN:MAX] or NAME:DIM=16*NAME[MIN:MAX], such as image:0=batch[1:64]; NAME:DIM=4 fixes a size"

# The same as people write them elsewhere.
_LOOSE_PLACE = re.compile(r"(?P<tensor>[A-Za-z_][\w.]*?)[\s:.\[]+(?P<dim>[0-9]+)\]?\s*[=:]+\s*(?P<expression>.+)")
_LOOSE_EXPRESSION = re.compile(
    rf"(?:(?P<scale>[0-9]+)\s*[*x]?\s*)?(?P<name>{_NAME})(?:\*(?P<factor>[0-9]+))?(?P<offset>[+-][0-9]+)?"
    r"[:=]?[\[({]?(?P<min>[0-9]+)\s*(?:-|:|,|;|\.\.+|to)\s*(?P<max>[0-9]+)[\])}]?"
)
_LOOSE_RANGE = re.compile(
    rf"(?P<name>{_NAME})\s*[=:]?\s*[\[({{]?(?P<min>[0-9]+)\s*(?:-|:|,|;|\.\.+|to)\s*(?P<max>[0-9]+)[\])}}]?"
)
_LOOSE_INPUT = re.compile(
    r"(?P<name>[A-Za-z_][\w.]*)\s*[=:]\s*(?P<dtype>[A-Za-z_.0-9]*)\s*[\[({](?P<sizes>[0-9,;xX*\s]*)[\])}]?"
)
_CASTS = ("float16", "bfloat16", "float32", "float64")
_OTHER_NAMES = {
    "float": "float32", "double": "float64", "half": "float16", "int": "int64", "long": "int64", "short": "int16",
    "char": "int8", "byte": "uint8", "boolean": "bool", "cfloat": "complex64", "cdouble": "complex128",
    "bf16": "bfloat16", "brain": "bfloat16", "fp8": "float8_e4m3fn", "float8": "float8_e4m3fn",
    "complex": "complex64", "integer": "int64", "single": "float32",
}  # fmt: skip


def parse_places(texts: Iterable[str]) -> dict[str, dict[int, str]]:
    """Parses texts such as "image:0=batch[1:64]".

    Raises:
        UsageError: A text has another form, or two texts give the same dimension.
    """
    shapes: dict[str, dict[int, str]] = {}
    for text in texts:
        match = _PLACE.fullmatch(text.strip())
        if match is None:
            hint = meant(text, _place_meant, lambda other: _read_places([other])) or f"Write {_FORM}."
            raise UsageError(f"cannot read the dynamic size {text!r}", hint=hint)
        dims = shapes.setdefault(match["tensor"].strip(), {})
        if (dim := int(match["dim"])) in dims:
            raise UsageError(f"dimension {dim} of {match['tensor']} is given twice: {dims[dim]} and {text}")
        dims[dim] = match["expression"].strip()
    return shapes


def parse_ranges(texts: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Parses texts such as "length=1:4096".

    Raises:
        UsageError: A text has another form, or two texts give the same name.
    """
    ranges: dict[str, tuple[int, int]] = {}
    for text in texts:
        match = _RANGE.fullmatch(text.strip())
        if match is None or int(match["min"]) >= int(match["max"]):
            form = "Write NAME=MIN:MAX with MIN below MAX, such as length=1:4096."
            hint = form if match else meant(text, _range_meant, lambda other: parse_ranges([other])) or form
            raise UsageError(f"cannot read the range {text!r}", hint=hint)
        if match["name"] in ranges:
            raise UsageError(f"the range of {match['name']} is given twice")
        ranges[match["name"]] = int(match["min"]), int(match["max"])
    return ranges


def size_of(text: str) -> Size | None:
    """Returns the size that an expression means; None if it fixes a size."""
    return None if text.strip().isdecimal() else parse_expression(text)[0]


def parse_expression(text: str) -> tuple[Size, tuple[int, int] | None]:
    """Parses a size expression with an optional range: "16*gh[8:96]", "batch", "n+1[2:9]".

    Raises:
        UsageError: The text has another form.
    """
    match = _EXPRESSION.fullmatch(re.sub(r"\s+", "", text))
    if match is None:
        raise UsageError(
            f"cannot read the size {text!r}",
            hint=meant(text, _expression_meant, parse_expression)
            or "Write NAME[MIN:MAX], or with a factor and an offset: 16*NAME[MIN:MAX], 2*NAME+1[MIN:MAX].",
        )
    scale = int(match["scale"] or 1)
    if scale < 1:
        raise UsageError(f"the size {text!r} is always 0: the factor must be at least 1")
    size = Size(
        dimension=match["name"], scale=scale, offset=int(match["offset"] or 0) * (-1 if match["sign"] == "-" else 1)
    )
    if match["min"] is None:
        return size, None
    low, high = int(match["min"]), int(match["max"])
    if low >= high:
        raise UsageError(
            f"the range [{low}:{high}] of `{size.dimension}` is empty or has only one value",
            hint="MIN must be below MAX. Leave out a size that never varies.",
        )
    return size, (low, high)


def parse_input_text(text: str) -> tuple[str, str, list[int]]:
    """Parses "image=float32[2,3,64,64]": the name, the dtype and the sizes.

    Raises:
        UsageError: The text has another form or an unknown dtype.
    """
    match = _INPUT.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            f"cannot read the input {text!r}",
            hint=meant(text, _input_meant, parse_input_text)
            or "Write NAME=DTYPE[SIZES], such as image=float32[2,3,64,64]."
            + (" Sizes are those of an example; --dynamic image:0=batch[1:64] lets one vary." * ("[" in text)),
        )
    check_dtype(match["dtype"])
    return match["name"].strip(), match["dtype"], [int(size) for size in match["sizes"].split(",") if size.strip()]


def check_dtype(name: str) -> None:
    """Checks that a package can have a dtype.

    Raises:
        UsageError: It cannot.
    """
    if name not in DTYPES:
        raise UsageError(f"a package cannot have dtype {name!r}", hint=dtype_hint(name, DTYPES))


def check_cast(name: str) -> None:
    """Checks that a model can be cast to a dtype.

    Raises:
        UsageError: The name is not a floating dtype's.
    """
    if name not in _CASTS:
        raise UsageError(f"cannot cast a model to {name}", hint=dtype_hint(name, _CASTS))


def dtype_hint(name: str, allowed: Collection[str]) -> str:
    """Returns the advice for a dtype that is not one of those that are allowed."""
    plain = name.lower().removeprefix("torch.").removeprefix("np.")
    named = _OTHER_NAMES.get(plain, re.sub(r"^(?:fp?|float_)(?=\d+$)", "float", re.sub(r"^i(?=\d+$)", "int", plain)))
    close = [named] if named in allowed else difflib.get_close_matches(plain, sorted(allowed), 1, 0.75)
    others = f"Give one of {', '.join(sorted(allowed))}."
    return f"Did you mean {close[0]}? {others}" if close else others


def check_texts(
    dynamic: Iterable[str] = (), ranges: Iterable[str] = (), inputs: Iterable[str] = (), dtype: str | None = None
) -> None:
    """Checks what can be checked of options without torch and without the model.

    Raises:
        UsageError: A text cannot be read.
    """
    _read_places(dynamic)
    parse_ranges(ranges)
    for text in inputs:
        parse_input_text(text)
    if dtype is not None:
        check_cast(dtype)


def meant(text: str, guess: Callable[[str], str | None], read: Callable[[str], object]) -> str | None:
    """Returns the question whether another text was meant, if there is one and it can be read."""
    other = guess(text.strip())
    if other is None or other == text:
        return None
    try:
        read(other)
    except ExportkitError:
        return None
    return f"Did you mean {other}?"


def _read_places(texts: Iterable[str]) -> None:
    for dims in parse_places(texts).values():
        for expression in dims.values():
            size_of(expression)


def _place_meant(text: str) -> str | None:
    match = _LOOSE_PLACE.fullmatch(text)
    if match is None:
        return None
    expression = match["expression"]
    return f"{match['tensor']}:{match['dim']}={_expression_meant(expression) or expression}"


def _expression_meant(text: str) -> str | None:
    match = _LOOSE_EXPRESSION.fullmatch(re.sub(r"\s+", "", text))
    if match is None:
        return None
    factor = match["scale"] or match["factor"]
    return f"{factor + '*' if factor else ''}{match['name']}{match['offset'] or ''}[{match['min']}:{match['max']}]"


def _range_meant(text: str) -> str | None:
    match = _LOOSE_RANGE.fullmatch(text)
    return match and f"{match['name']}={match['min']}:{match['max']}"


def _input_meant(text: str) -> str | None:
    match = _LOOSE_INPUT.fullmatch(text)
    if match is None:
        return None
    sizes = ",".join(re.findall("[0-9]+", match["sizes"]))
    dtype = match["dtype"].lower().removeprefix("torch.") or "float32"
    close = re.match(r"Did you mean (\w+)", dtype_hint(dtype, DTYPES))
    return f"{match['name']}={dtype if dtype in DTYPES else close[1] if close else dtype}[{sizes}]"
