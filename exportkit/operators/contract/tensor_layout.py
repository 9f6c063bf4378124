"""How a tensor is written in a layout.

A tensor is its dimensions: "B N D". A name is a size, which is the same wherever the name occurs; a number is a fixed
size; `...` stands for any dimensions before the others, which are the same wherever it occurs. The dtype follows a
colon:

    "B N D"             the dtype of the first input, which is floating
    "B N D: floating"   any floating dtype
    "B k: int64"        this dtype
    "B D: accumulated"  the dtype that sums are computed in: float64 if the first input is float64, else float32
    "B D | B T D"       one of two shapes
    "query.T: bool"     the T of `query`, which must have its shape with a T
    "B D of features"   errors name the shape of `features`, because the tensor was computed from it
    "()"                no dimensions
    "*"                 any shape

For results there are three forms more. "like x" is the shape and the dtype of an argument, and "B k: like x" its dtype.
"... if need_x" is [0] unless the argument `need_x` is true. A dimension may be an expression, such as `H/patch_size`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

_TENSOR = re.compile(r"(?P<shapes>[^:]+?)(?: of (?P<of>\w+))?(?:: (?P<dtype>\w+(?: \w+)?))?(?: if (?P<flag>\w+))?")

_DTYPES = (
    "floating",
    "accumulated",
    "float32",
    "int64",
    "bool",
    *(n for n, v in vars(torch).items() if isinstance(v, torch.dtype)),
)
_DIM = re.compile(r"(\w+\.)?\w+|[\w*/()]+")


class Dim(NamedTuple):
    """A dimension: its name, number or expression, and the tensor that must have a dimension of this name."""

    text: str
    owner: str | None = None

    @property
    def fixed(self) -> int | None:
        """The size, if it is a number."""
        return int(self.text) if self.text.isdigit() else None

    @property
    def is_named(self) -> bool:
        """Whether it is a name."""
        return self.text.isidentifier()


class Shape(NamedTuple):
    """One shape that a tensor may have: its last dimensions, and whether others may be before them."""

    dims: tuple[Dim, ...]
    more: bool = False
    anything: bool = False

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Reads "B N D", "... D", "()" or "*". Raises ValueError for another text."""
        first, *rest = text.split()
        if first in ("*", "()"):
            return cls((), more=first == "*", anything=first == "*")
        words = rest if first == "..." else [first, *rest]
        if not all(_DIM.fullmatch(word) and word not in ("of", "if", "like") for word in words):
            raise ValueError(f"{text!r} is not a shape; write such as 'B N D', '... D', '()' or '*'")
        return cls(tuple(Dim(*reversed(word.split("."))) for word in words), more=first == "...")

    def __str__(self) -> str:
        return "[" + ", ".join(["..."] * self.more + [dim.text for dim in self.dims]) + "]"

    def has_rank(self, rank: int) -> bool:
        """Returns whether a tensor of this rank may have the shape."""
        return rank >= len(self.dims) if self.more else rank == len(self.dims)

    def before(self, tensor: Tensor) -> Sequence[Any]:
        """Returns the sizes that `...` stands for."""
        return tensor.shape[: tensor.dim() - len(self.dims)]

    def last(self, tensor: Tensor) -> list[tuple[Dim, int, Any]]:
        """Returns the written dimensions, each with its place and its size."""
        first = tensor.dim() - len(self.dims)
        return [(dim, place, tensor.shape[place]) for place, dim in enumerate(self.dims, first)]


@dataclass(frozen=True)
class TensorLayout:
    """One tensor of a layout: the shapes that it may have, and what follows the colon.

    It may be `like` an argument, or have its dtype only. It may be computed from the tensor `of`. A `flag` is the
    argument that says whether a result is computed.
    """

    shapes: tuple[Shape, ...]
    dtype: str | None
    of: str | None
    flag: str | None
    like: str | None

    @classmethod
    def parse(cls, text: str) -> TensorLayout:
        """Reads a tensor. Raises ValueError for another text."""
        match = _TENSOR.fullmatch(text)
        if match is None or not all(part.strip() for part in match["shapes"].split("|")):
            raise ValueError(f"{text!r} is not the layout of a tensor; write such as 'B N D' or 'B k: int64'")
        shapes, dtype = match["shapes"], match["dtype"]
        like = next((part[5:] for part in (shapes, dtype or "") if part.startswith("like ")), None)
        if dtype is not None and dtype not in _DTYPES and not dtype.startswith("like "):
            raise ValueError(f"{text!r}: {dtype!r} is not a dtype; write such as {', '.join(_DTYPES[:5])}")
        alternatives = [] if shapes.startswith("like ") else shapes.split("|")
        return cls(tuple(map(Shape.parse, alternatives)), dtype, match["of"], match["flag"], like)

    def __str__(self) -> str:
        text = " or ".join(map(str, self.shapes)) or f"like {self.like}"
        return text + (f" {self.dtype}" if self.dtype else "") + (f" if {self.flag}" if self.flag else "")

    def named(self) -> list[str]:
        """Returns the arguments that the layout refers to, but for numbers."""
        owners = [dim.owner for shape in self.shapes for dim in shape.dims]
        return [name for name in [self.of, self.like, *owners] if name is not None]

    def shape_of(self, tensor: Tensor) -> Shape | None:
        """Returns which of the shapes has the tensor's rank."""
        return next((shape for shape in self.shapes if shape.has_rank(tensor.dim())), None)
