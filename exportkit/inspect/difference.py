"""What a comparison of two artifacts finds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
        max_abs: For tensors, the greatest absolute difference of two elements; inf if only one of them is NaN or
            infinite.
    """

    part: str
    what: str
    a: str | None
    b: str | None
    effect: Effect | None = None
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
