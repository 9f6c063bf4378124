"""Calls that an operator must refuse, drawn from its layout: each breaks one rule of a valid call."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from exportkit.operators.contract.layout import Layout
from exportkit.operators.contract.tensor_layout import Dim, Shape, TensorLayout

Change = tuple[str, dict[str, Any]]
"""What is wrong, and the changed arguments."""


def drawn_refusals(op: str, layout: Layout, arguments: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Breaks every rule of a layout, one at a time: yields what is wrong, every argument by name, the layout's words.

    The arguments are those of a valid call, of which sizes of at least 2 show most. It raises AssertionError if the
    layout takes a call that breaks one of its rules.
    """
    for label, changed in _Changes(layout, arguments).all():
        try:
            layout.fake(op, {**arguments, **changed})
        except RuntimeError as error:
            yield label, {**arguments, **changed}, str(error).splitlines()[0]
        else:
            raise AssertionError(f"{op}: the layout takes a call with {label}")


class _Changes:
    def __init__(self, layout: Layout, arguments: Mapping[str, Any]) -> None:
        self.layouts = [part for _, part in layout.chain("")]
        self.arguments = arguments
        self.tensors: dict[str, TensorLayout] = {}
        for part in self.layouts:
            self.tensors |= {
                n: t for n, t in part.tensors.items() if arguments[n] is not None and n not in self.tensors
            }
        self.first = next(iter(self.tensors), "")
        self.expressions = [e for part in self.layouts for _, e in part.derived.values()]
        self.expressions += [dim.text for result in layout.results for shape in result.shapes for dim in shape.dims]

    def all(self) -> Iterator[Change]:
        for name, text in self.tensors.items():
            yield from self.of_dtype_and_device(name, text)
            if not self.shape(name).anything:
                yield from self.of_rank(name, self.shape(name))
                yield from self.of_sizes(name, self.shape(name))
        yield from self.of_numbers()
        yield from self.of_computed_sizes()

    def shape(self, name: str) -> Shape:
        shape = self.tensors[name].shape_of(self.arguments[name])
        assert shape is not None, f"the valid call's {name} has shape {list(self.arguments[name].shape)}"
        return shape

    def places(self) -> Iterator[tuple[str, Dim, int]]:
        """Yields every written dimension: the tensor's name, the dimension and its place."""
        for name in self.tensors:
            for dim, place, _ in self.shape(name).last(self.arguments[name]):
                yield name, dim, place

    def of_dtype_and_device(self, name: str, text: TensorLayout) -> Iterator[Change]:
        given, base = self.arguments[name], self.arguments[self.first]
        if name == self.first or text.dtype == "floating":
            dtype = torch.int64
        elif text.dtype in (None, "accumulated"):
            dtype = torch.float16 if base.dtype == torch.float64 else torch.float64
        else:
            dtype = torch.uint8 if text.dtype == "bool" else torch.int32
        yield f"{name} of another dtype", {name: given.to(dtype)}
        if given.is_cuda and name != self.first:  # on a CPU, no kernel sees a tensor of another device
            yield f"{name} on another device", {name: given.cpu()}

    def of_rank(self, name: str, shape: Shape) -> Iterator[Change]:
        given = self.arguments[name]
        if name != self.first or not shape.more:
            deeper = given[None]
            while not shape.more and self.tensors[name].shape_of(deeper) is not None:
                deeper = deeper[None]
            yield f"{name} of another rank", {name: deeper}
        elif shape.dims:  # every tensor with `...` is changed, because they must be alike
            alike = [other for other, text in self.tensors.items() if any(s.more for s in text.shapes)]
            yield f"{name} without dimensions", dict.fromkeys(alike, given.flatten()[0])

    def of_sizes(self, name: str, shape: Shape) -> Iterator[Change]:
        given = self.arguments[name]
        if name != self.first and len(shape.before(given)):
            yield f"{name} of another size", {name: _longer(given, 0)}
        least = {symbol: size for part in self.layouts for symbol, size in part.least.items()}
        for dim, place, _ in shape.last(given):
            holder = next((other, at) for other, theirs, at in self.places() if theirs.text == dim.text)
            if dim.fixed is not None or holder != (name, place):
                yield f"{name} of another {dim.text}", {name: _longer(given, place)}
            elif dim.text in least:
                size = least[dim.text] - 1
                yield f"{name} of {dim.text} = {size}", {name: given.narrow(place, 0, size)}

    def of_numbers(self) -> Iterator[Change]:
        for name, rule in ((name, rule) for part in self.layouts for name, rule in part.numbers.items()):
            compare, bound = rule.split()
            too_low = int(bound) - (compare == ">=")
            floats = isinstance(self.arguments[name], float)
            for value in (float(too_low), too_low - 0.5, float("nan")) if floats else (too_low, too_low - 1):
                yield f"{name} = {value}", {name: value}

    def of_computed_sizes(self) -> Iterator[Change]:
        for symbol in dict.fromkeys(dim.text for _, dim, _ in self.places() if dim.is_named):
            if any(symbol in part.derived for part in self.layouts):
                yield f"another {symbol}", self.with_longer(symbol)
            if any(re.search(rf"\b{symbol} ?/", expression) for expression in self.expressions):
                yield f"{symbol} that is not a multiple", self.with_longer(symbol)

    def with_longer(self, symbol: str) -> dict[str, Tensor]:
        """Returns the tensors that have a symbol, its size one larger in all of them."""
        changed: dict[str, Tensor] = {}
        for name, dim, place in self.places():
            if dim.text == symbol:
                changed[name] = _longer(changed.get(name, self.arguments[name]), place)
        return changed


def _longer(tensor: Tensor, place: int) -> Tensor:
    return torch.cat([tensor, tensor.narrow(place, 0, 1)], place)
