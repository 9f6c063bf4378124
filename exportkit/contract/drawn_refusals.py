"""Calls that an operator must refuse, drawn from its layout: each breaks one rule of a valid call."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from exportkit.contract.layout import Layout, Shape, TensorLayout


class Drawn(NamedTuple):
    """A call that must be refused.

    Attributes:
        label: What is wrong.
        arguments: Every argument by name.
        message: The layout's words.
    """

    label: str
    arguments: dict[str, Any]
    message: str


def drawn_refusals(op: str, layout: Layout, arguments: Mapping[str, Any]) -> Iterator[Drawn]:
    """Breaks every rule of a layout, one at a time.

    Args:
        op: The operator's name.
        layout: Its layout.
        arguments: A valid call, by name. Sizes of at least 2 show most.

    Raises:
        AssertionError: The layout takes a call that breaks one of its rules.
    """
    for label, changed in _changes(op, layout, arguments):
        try:
            layout.fake(op, {**arguments, **changed})
        except RuntimeError as error:
            yield Drawn(label, {**arguments, **changed}, str(error).splitlines()[0])
        else:
            raise AssertionError(f"{op}: the layout takes a call with {label}")


def _changes(op: str, layout: Layout, arguments: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields what to change, and what is wrong then."""
    call = _Call(op, layout, arguments)
    for (name, text), given in call.tensors.items():
        shape = text.shape_of(given)
        assert shape is not None, f"{op}: the sample has a {name} of shape {list(given.shape)}"
        is_first = name == call.first
        yield f"{name} of another dtype", {name: given.to(_other_dtype(text, is_first, call.base))}
        if call.base.is_cuda and not is_first:
            yield f"{name} on another device", {name: given.cpu()}
        if not shape.unchecked:
            yield from call.other_shapes(name, text, shape, is_first)
    for _, part in layout.chain(op):
        for name, rule in part.numbers.items():
            compare, bound = rule.split()
            too_low = int(bound) - (compare == ">=")
            for value in (float(too_low), -2.0, float("nan")) if isinstance(arguments[name], float) else (too_low,):
                yield f"{name} = {value}", {name: value}
        for symbol in part.derived:
            yield f"another {symbol}", call.with_size(symbol, 1)
    for symbol in call.symbols():
        if re.search(rf"\b{symbol} ?/", call.expressions):
            yield f"{symbol} that is not a multiple", call.with_size(symbol, 1)


def _other_dtype(text: TensorLayout, is_first: bool, base: Tensor) -> torch.dtype:
    """Returns a dtype that is refused."""
    if is_first or text.dtype == "floating":
        return torch.int64
    if text.dtype in (None, "accumulated"):
        return torch.float16 if base.dtype == torch.float64 else torch.float64
    return torch.uint8 if text.dtype == "bool" else torch.int32


class _Call:
    """A valid call, and its tensors with their layouts."""

    def __init__(self, op: str, layout: Layout, arguments: Mapping[str, Any]) -> None:
        self.least: dict[str, int] = {}
        self.tensors: dict[tuple[str, TensorLayout], Tensor] = {}
        self.expressions = " ".join(dim for result in layout.results for shape in result.shapes for dim in shape.dims)
        for _, part in layout.chain(op):
            self.least |= part.least
            self.expressions += " ".join(expression for _, expression in part.derived.values())
            for name, text in part.tensors.items():
                if arguments[name] is not None and all(name != known for known, _ in self.tensors):
                    self.tensors[name, text] = arguments[name]
        (self.first, _), self.base = next(iter(self.tensors.items()))

    def places(self) -> Iterator[tuple[str, str, int]]:
        """Yields every dimension that has a name or a number: the tensor's name, the dimension's and its place."""
        for (name, text), given in self.tensors.items():
            if (shape := text.shape_of(given)) is not None:
                for dim, written in enumerate(shape.dims, -len(shape.dims)):
                    yield name, written.rpartition(".")[2], dim

    def symbols(self) -> Iterable[str]:
        """Returns the names of all sizes."""
        return dict.fromkeys(symbol for _, symbol, _ in self.places() if not symbol.isdigit())

    def with_size(self, symbol: str, more: int) -> dict[str, Tensor]:
        """Returns the tensors that have the symbol, all of them larger by `more`."""
        changed: dict[str, Tensor] = {}
        given = {name: tensor for (name, _), tensor in self.tensors.items()}
        for name, found, dim in self.places():
            if found == symbol:
                changed[name] = _resized(changed.get(name, given[name]), dim, more)
        return changed

    def other_shapes(
        self, name: str, text: TensorLayout, shape: Shape, is_first: bool
    ) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Yields one tensor with another rank and with each size another, where that is wrong."""
        given = self.tensors[name, text]
        if not is_first or not shape.any_before:
            deeper = given[None]
            while text.shape_of(deeper) is not None and not shape.any_before:
                deeper = deeper[None]
            yield f"{name} of another rank", {name: deeper}
        elif shape.dims:  # every tensor with `...`, because they must be alike
            alike = [other for other, theirs in self.tensors if any(s.any_before for s in theirs.shapes)]
            yield f"{name} without dimensions", dict.fromkeys(alike, self.base.flatten()[0])
        if shape.any_before and not is_first and given.dim() > len(shape.dims):
            yield f"{name} of another size", {name: _resized(given, 0, 1)}
        for place, symbol, dim in list(self.places()):
            holders = [other for other, theirs, _ in self.places() if theirs == symbol]
            if place != name:
                continue
            if symbol.isdigit() or holders[0] != name:
                yield f"{name} of another {symbol}", {name: _resized(given, dim, 1)}
            elif symbol in self.least:
                least = self.least[symbol]
                yield f"{name} of {symbol} = {least - 1}", {name: given.narrow(dim, 0, least - 1)}


def _resized(tensor: Tensor, dim: int, more: int) -> Tensor:
    """Repeats the first elements of a dimension at its end."""
    return torch.cat([tensor, tensor.narrow(dim, 0, more)], dim)
