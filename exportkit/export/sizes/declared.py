"""What the caller declared of sizes, and what follows from it for the conditions of a trace."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import sympy

from exportkit.export.sizes.shapes import DynamicSizes
from exportkit.export.sizes.tried_sizes import Ranges, counterexamples, holds
from exportkit.package.manifest import Size

_NEAR = 4  # sizes up to so many times the example's are near


@dataclass(frozen=True)
class Declared:
    """The declared sizes. A name is one number at all of its places.

    Attributes:
        places: The size of each place, such as "image:2".
        ranges: The range of each name.
        example: The value of each name in the example inputs.
    """

    places: Mapping[str, Size] = field(default_factory=dict)
    ranges: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    example: Mapping[str, int] = field(default_factory=dict)
    _untrue: dict[sympy.Basic, bool] = field(default_factory=dict)

    def in_names(self, condition: sympy.Basic, places: Mapping[sympy.Symbol, str | None]) -> sympy.Basic:
        """Writes a condition on the sizes of places in the declared names."""
        sizes = {symbol: self.places.get(place or "") for symbol, place in places.items()}
        return condition.xreplace(
            {symbol: size.scale * _symbol(size.dimension) + size.offset for symbol, size in sizes.items() if size}
        )

    def untrue(self, condition: sympy.Basic) -> bool:
        """Returns whether a condition in names fails for declared sizes.

        Tracing takes every size to be at least 2, so a condition that fails at 1 alone counts as true, as for torch.
        """
        if condition not in self._untrue:
            self._untrue[condition] = not (holds(condition, _ranges(self.ranges)) or holds(condition, self._from_two()))
        return self._untrue[condition]

    def failing(self, condition: sympy.Basic) -> list[dict[str, int]]:
        """Returns the least, the greatest and one of the sizes for which a condition fails, as far as they were found.

        Those near the example's come first.
        """
        wide, all_sizes = self._from_two(), _ranges(self.ranges)
        near = {s: (low, min(high, max(low, _NEAR * self.example[s.name]))) for s, (low, high) in wide.items()}
        found = counterexamples(condition, near) + counterexamples(condition, wide)
        found = found or counterexamples(condition, all_sizes)
        sizes = [{**self.example, **{symbol.name: value for symbol, value in each.items()}} for each in found]
        return [each for i, each in enumerate(sizes) if each not in sizes[:i]]

    def beside(self, condition: sympy.Basic) -> list[dict[str, int]]:
        """Returns sizes on both sides of a condition in names: where it begins and ends to fail, in turn."""
        sides = [self.failing(condition), self.failing(sympy.Not(condition))]
        rows = itertools.zip_longest(*sides)
        return [each for row in rows for each in row if each is not None]

    def _from_two(self) -> Ranges:
        """Returns the ranges without the values at which a place has a size below 2."""
        ranges = dict(self.ranges)
        for size in self.places.values():
            low, high = ranges[size.dimension]
            ranges[size.dimension] = (max(low, -((size.offset - 2) // size.scale)), high)
        return _ranges({name: ends for name, ends in ranges.items() if ends[0] <= ends[1]})


def declared(sizes: DynamicSizes, more: Mapping[str, str] = MappingProxyType({})) -> Declared:
    """Returns what the caller declared.

    `more` has the names of further places, those of the state.
    """
    places = {f"{tensor}:{dim}": size for (tensor, dim), size in sizes.by_axis.items()}
    return Declared(
        places={**places, **{place: Size(dimension=name) for place, name in more.items()}},
        ranges={dimension.name: (dimension.min, dimension.max) for dimension in sizes.dimensions},
        example=sizes.example,
    )


def _symbol(name: str) -> sympy.Symbol:
    return sympy.Symbol(name, integer=True, nonnegative=True)


def _ranges(ranges: Mapping[str, tuple[int, int]]) -> Ranges:
    return {_symbol(name): ends for name, ends in ranges.items()}
