"""What a comparison of two artifacts finds, and how two manifest entries are compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec

S = TypeVar("S")
T = TypeVar("T")

Effect = Literal["answer", "load"]


@dataclass(frozen=True)
class Difference:
    """One difference of two artifacts A and B.

    Attributes:
        part: The part of the artifacts, such as "weights".
        what: The thing that differs, such as "head.weight".
        a: A's value; None if only B has the thing.
        b: B's value; None if only A has the thing.
        effect: What it may change: the answer of a call, or where and how the artifact can be loaded. None: neither.
        note: A remark, such as which symbols a library needs.
        max_abs: For tensors, the greatest absolute difference of two elements; inf if only one of them is NaN or
            infinite.
    """

    part: str
    what: str
    a: str | None
    b: str | None
    effect: Effect | None = None
    note: str | None = None
    max_abs: float | None = None


@dataclass(frozen=True)
class Side:
    """One of the two artifacts: its file, its name and version, the file's size in bytes and its digest."""

    path: str
    name: str
    version: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison.

    Attributes:
        a: The first artifact.
        b: The second artifact.
        differences: All differences, by part.
        notes: What could not be compared, and why.
    """

    a: Side
    b: Side
    differences: tuple[Difference, ...]
    notes: tuple[str, ...]

    @property
    def same(self) -> bool:
        """Whether no difference changes an answer or a load."""
        return not any(difference.effect for difference in self.differences)


def both(of: Callable[[S], T], a: S, b: S) -> tuple[T, T]:
    """Returns the same of both sides."""
    return of(a), of(b)


def paired(
    part: str,
    kind: str,
    a: Mapping[str, T],
    b: Mapping[str, T],
    effect: Effect | None,
    text: Callable[[Any], str] = str,
) -> Iterator[Difference | tuple[str, T, T]]:
    """Yields a difference for each name that one side lacks, and the two entries of each name that both have.

    Args:
        part: The part of the artifacts.
        kind: What a name names, such as "target"; it precedes the name in a difference.
        a: A's entries by name.
        b: B's entries by name.
        effect: What an entry changes that one side lacks.
        text: Describes an entry.
    """
    for name in dict.fromkeys([*a, *b]):
        if name in a and name in b:
            yield name, a[name], b[name]
        else:
            only_a, only_b = (text(side[name]) if name in side else None for side in (a, b))
            yield Difference(part, f"{kind} {name}".strip(), only_a, only_b, effect)


def entries(
    part: str,
    kind: str,
    a: Mapping[str, T],
    b: Mapping[str, T],
    effect: Effect | None,
    text: Callable[[Any], str] = str,
    *,
    note: str | None = None,
) -> Iterator[Difference]:
    """Yields a difference for each name that one side lacks, or whose entries have different texts.

    `note` is for the latter. The others are as for `paired`.
    """
    for found in paired(part, kind, a, b, effect, text):
        if isinstance(found, Difference):
            yield found
        elif (one := text(found[1])) != (other := text(found[2])):
            yield Difference(part, f"{kind} {found[0]}".strip(), one, other, effect, note)


def fields(
    part: str, what: str, a: msgspec.Struct, b: msgspec.Struct, effects: Mapping[str, Effect | None]
) -> Iterator[Difference]:
    """Yields a difference for each of some fields that differs in two entries, with what such a field changes."""
    for field, effect in effects.items():
        one, other = getattr(a, field), getattr(b, field)
        if one != other:
            yield Difference(part, f"{what}: {field}".removeprefix(": "), plain(one), plain(other), effect)


def plain(value: object) -> str:
    """Returns a value of a manifest as text: JSON, but without the quotes of a string."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
