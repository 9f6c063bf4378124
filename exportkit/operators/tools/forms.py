"""The form of a call: what its tensors look like and what its other arguments are. Calls are drawn from forms."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from exportkit.operators.contract.sample import Sample

Values = Literal["normal", "index", "offsets", "permutation"]

# Integer arguments that are likely to point into another argument, and floats in a kernel's first call are likely.
_OFFSETS = re.compile(r"offset|cumsum|indptr|ptr$")
_PERMUTATION = re.compile(r"perm")
_INDEX = re.compile(r"ind(ex|ices)|idx|_ids?$|^ids|length|size|segment|target|label|rows?$|cols?$")
_MASK = re.compile(r"mask$|^is_|_flags?$")


class UnknownTypeError(Exception):
    """No value of an argument's type can be drawn. The message names it."""


@dataclass(frozen=True)
class TensorForm:
    """A tensor: its dtype, its shape, and what integers in it mean."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    values: Values = "normal"

    def draw(self, highest: int, device: torch.device) -> Tensor:
        """Draws the tensor from torch's generator. Indices stay below the highest number, and offsets reach it."""
        if self.dtype.is_floating_point or self.dtype.is_complex:
            wide = torch.complex64 if self.dtype.is_complex else torch.float32
            return torch.randn(self.shape, dtype=wide).to(self.dtype).to(device)
        if self.dtype == torch.bool:
            return torch.rand(self.shape).gt(0.5).to(device)
        if self.values == "offsets" and len(self.shape) == 1 and self.shape[0]:
            return torch.linspace(0, highest, self.shape[0]).floor().to(self.dtype).to(device)
        if self.values == "permutation" and len(self.shape) == 1:
            return torch.randperm(self.shape[0]).to(self.dtype).to(device)
        return torch.randint(0, max(1, highest), self.shape).to(self.dtype).to(device)


@dataclass(frozen=True)
class Argument:
    """An argument of a schema: of a kind such as "Tensor", "int", "ScalarType", or a list of these.

    `length` is the list's, where the schema fixes it. Without a default it is `Argument.REQUIRED`.
    """

    name: str
    kind: str
    optional: bool
    listed: bool
    length: int | None
    keyword: bool
    default: Any

    REQUIRED = object()

    @property
    def is_tensor(self) -> bool:
        """Whether its values are tensors."""
        return self.kind == "Tensor"

    def first(self, shape: tuple[int, ...]) -> Any:
        """Returns the value that a first call has. Raises UnknownTypeError if there is none."""
        if self.default is not Argument.REQUIRED:
            return self.default
        if self.optional and not self.listed:
            return None
        one = self.one(shape)
        if one is None:
            if self.optional:
                return None
            raise UnknownTypeError(f"{self.name} is of type {self.kind}, of which no value can be drawn")
        return (one,) * (self.length or 2) if self.listed else one

    def one(self, shape: tuple[int, ...]) -> Any:
        """Returns a first value, of a list an element; None if there is none."""
        return self.tensor(shape) if self.is_tensor else _FIRST.get(self.kind)

    def tensor(self, shape: tuple[int, ...]) -> TensorForm:
        """Returns the tensor that the argument's name suggests."""
        if _OFFSETS.search(self.name):
            return TensorForm(torch.int64, shape[-1:] or (3,), "offsets")
        if _PERMUTATION.search(self.name):
            return TensorForm(torch.int64, shape[:1], "permutation")
        if _INDEX.search(self.name):
            return TensorForm(torch.int64, shape[:1], "index")
        return TensorForm(torch.bool if _MASK.search(self.name) else torch.float32, shape)


_FIRST: dict[str, Any] = {
    "int": 1,
    "SymInt": 1,
    "float": 0.5,
    "bool": False,
    "number": 1,
    "str": "",
    "ScalarType": torch.float32,
    "Device": torch.device("cpu"),
    "Layout": torch.strided,
    "MemoryFormat": torch.contiguous_format,
    "complex": 1j,
}

Form = tuple[Any, ...]
"""The value of each argument, where a TensorForm stands for a tensor."""


def arguments_of(schema: torch.FunctionSchema) -> tuple[Argument, ...]:
    """Reads a schema's arguments."""
    found, arguments = list[Argument](), list[Any](schema.arguments)  # torch's stubs do not know all attributes
    for argument in arguments:
        kind, optional, listed = str(argument.real_type), False, False
        while match := re.fullmatch(r"(Optional|List)\[(.+)\]", kind):
            optional, listed = optional or match[1] == "Optional", listed or match[1] == "List"
            kind = match[2]
        default = argument.default_value if argument.has_default_value() else Argument.REQUIRED
        default = tuple(default) if isinstance(default, list) else default
        length = argument.N or None  # of a list, where the schema says so
        found.append(Argument(argument.name, kind, optional, listed, length, bool(argument.kwarg_only), default))
    return tuple(found)


def tensor_forms(form: Form) -> list[TensorForm]:
    """Returns the tensors of a form, those in lists included."""
    parts = [part for value in form for part in (value if isinstance(value, (tuple, list)) else (value,))]
    return [part for part in parts if isinstance(part, TensorForm)]


def draw(arguments: Sequence[Argument], form: Form, label: str, device: torch.device) -> Sample:
    """Draws a call of a form. Values come from torch's generator. Defaults are left out."""
    sizes = [size for each in tensor_forms(form) if each.dtype.is_floating_point for size in each.shape if size]
    highest = min(sizes, default=2)

    def value(part: Any) -> Any:
        if isinstance(part, TensorForm):
            return part.draw(highest, device)
        if isinstance(part, torch.device):
            return device
        return [value(each) for each in part] if isinstance(part, (tuple, list)) else part

    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument, part in zip(arguments, form):
        if not isinstance(part, TensorForm) and part == argument.default:
            continue
        if argument.keyword or len(args) < arguments.index(argument):
            kwargs[argument.name] = value(part)
        else:
            args.append(value(part))
    return Sample(label, tuple(args), kwargs)


def shapes_text(form: Form) -> str:
    """Returns such as "float32 [3, 5], int64 [3]"."""
    return ", ".join(f"{str(each.dtype)[6:]} {list(each.shape)}" for each in tensor_forms(form)) or "no tensors"
