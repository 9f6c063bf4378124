"""Reads and writes the sizes of a call as `--size` has them: `batch=8,gh=28`."""

from __future__ import annotations

from collections.abc import Mapping

from exportkit.errors import UsageError
from exportkit.package.manifest import Call


def size_option(sizes: Mapping[str, int]) -> str:
    """Returns sizes as `--size` takes them."""
    return ",".join(f"{name}={size}" for name, size in sizes.items())


def parse_sizes(text: str, call: Call) -> dict[str, int]:
    """Parses `batch=8,gh=28` to a number for each dimension of a call.

    Raises:
        UsageError: A dimension is missing, unknown or out of its range.
    """
    ranges = {dimension.name: dimension for dimension in call.dimensions}
    hint = "Give " + ",".join(f"{d.name}=N" for d in call.dimensions) + ", where "
    hint += ", ".join(f"{d.name} is {d.min} to {d.max}" for d in call.dimensions) + "."
    sizes = {}
    for part in filter(None, text.split(",")):
        name, equals, number = (piece.strip() for piece in part.partition("="))
        if not equals or not number.isdecimal() or name not in ranges:
            raise UsageError(f"--size {text}: {part!r} is not DIMENSION=NUMBER", hint=hint)
        if not ranges[name].min <= int(number) <= ranges[name].max:
            raise UsageError(f"--size {text}: {name} is out of its range", hint=hint)
        sizes[name] = int(number)
    if missing := [name for name in ranges if name not in sizes]:
        raise UsageError(f"--size {text}: {', '.join(missing)} is missing", hint=hint)
    return sizes
