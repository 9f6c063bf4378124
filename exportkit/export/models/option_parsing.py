"""Reads what the command line says of sizes, inputs and dtypes, without torch, so that a slip is said at once."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable

from exportkit.errors import UsageError
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
_VALUE = re.compile(r"[^=]+=(?![\w.]+ ?[\[(])")  # not NAME=WORD[ or NAME=WORD(
_EXAMPLE_SIZES = "The numbers are the sizes of an example; --dynamic image:0=batch[1:64] lets one vary."
_FORM = "NAME:DIM=NAME[MIN:MAX] or NAME:DIM=16*NAME[MIN:MAX], such as image:0=batch[1:64]; NAME:DIM=4 fixes a size"
NO_TENSOR = (
    "A number, a string or a bool is given with an ExportSpec, and MODEL names that: "
    'spec = exportkit.ExportSpec(model=..., example_inputs=(x,), example_kwargs={"mode": "a"}).'
)
_CASTS = ("float16", "bfloat16", "float32", "float64")
_ALIASES = {"half": "float16", "float": "float32", "double": "float64", "int": "int32", "long": "int64"}


def parse_places(texts: Iterable[str]) -> dict[str, dict[int, str]]:
    """Parses texts such as "image:0=batch[1:64]"."""
    shapes: dict[str, dict[int, str]] = {}
    for text in texts:
        match = _PLACE.fullmatch(text.strip())
        if match is None:
            raise UsageError(f"cannot read the dynamic size {text!r}", hint=f"Write {_FORM}.")
        dims = shapes.setdefault(match["tensor"].strip(), {})
        if (dim := int(match["dim"])) in dims:
            raise UsageError(f"dimension {dim} of {match['tensor']} is given twice: {dims[dim]} and {text}")
        dims[dim] = match["expression"].strip()
    return shapes


def parse_ranges(texts: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Parses texts such as "length=1:4096"."""
    ranges: dict[str, tuple[int, int]] = {}
    for text in texts:
        match = _RANGE.fullmatch(text.strip())
        if match is None or int(match["min"]) >= int(match["max"]):
            raise UsageError(
                f"cannot read the range {text!r}", hint="Write NAME=MIN:MAX with MIN below MAX, such as length=1:4096."
            )
        if match["name"] in ranges:
            raise UsageError(f"the range of {match['name']} is given twice")
        ranges[match["name"]] = int(match["min"]), int(match["max"])
    return ranges


def size_of(text: str) -> Size | None:
    """Returns the size that an expression means; None if it fixes a size."""
    return None if text.strip().isdecimal() else parse_expression(text)[0]


def parse_expression(text: str) -> tuple[Size, tuple[int, int] | None]:
    """Parses a size expression with an optional range: "16*gh[8:96]", "batch", "n+1[2:9]"."""
    match = _EXPRESSION.fullmatch(re.sub(r"\s*([^\w\s])\s*", r"\1", text.strip()))
    if match is None:
        raise UsageError(
            f"cannot read the size {text!r}",
            hint="Write NAME[MIN:MAX], a NAME without blanks, or with a factor and an offset: 16*NAME[MIN:MAX], "
            "2*NAME+1[MIN:MAX].",
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
    """Parses "image=float32[2,3,64,64]": the name, the dtype and the sizes."""
    match = _INPUT.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            f"cannot read the input {text!r}",
            hint="Write NAME=DTYPE[SIZES], such as image=float32[2,3,64,64]. "
            + (NO_TENSOR if _VALUE.match(text) else _EXAMPLE_SIZES),
        )
    check_dtype(match["dtype"])
    return match["name"].strip(), match["dtype"], [int(size) for size in match["sizes"].split(",") if size.strip()]


def check_dtype(name: str) -> None:
    """Checks that a package can have a dtype."""
    if name not in DTYPES:
        raise UsageError(f"a package cannot have dtype {name!r}", hint=dtype_hint(name, DTYPES))


def check_cast(name: str) -> None:
    """Checks that a model can be cast to a dtype."""
    if name not in _CASTS:
        raise UsageError(f"cannot cast a model to {name}", hint=dtype_hint(name, _CASTS))


def dtype_hint(name: str, allowed: Collection[str]) -> str:
    """Returns the advice for a dtype that is not one of those that are allowed."""
    plain = name.lower().removeprefix("torch.")
    close = [_ALIASES[plain]] if plain in _ALIASES else difflib.get_close_matches(plain, sorted(allowed), 1)
    others = f"Give one of {', '.join(sorted(allowed))}."
    return f"Did you mean {close[0]}? {others}" if close else others


def check_texts(
    dynamic: Iterable[str] = (), ranges: Iterable[str] = (), inputs: Iterable[str] = (), dtype: str | None = None
) -> None:
    """Checks what can be checked of options without torch and without the model."""
    for dims in parse_places(dynamic).values():
        for expression in dims.values():
            size_of(expression)
    parse_ranges(ranges)
    for text in inputs:
        parse_input_text(text)
    if dtype is not None:
        check_cast(dtype)
