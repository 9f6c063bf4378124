"""Looks for calls in which sizes that depend on data are 0, 1, 2, and as great as they get: code is apt to fail there.

torch takes for granted that such a size is neither 0 nor 1 where it asks about broadcasting and layout.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import KeyPath, key_get

from exportkit.errors import ExportError, UsageError
from exportkit.export.record.sequences import DrawnCall
from exportkit.export.torch_patches.dispatch import OperatorMode, watched_by
from exportkit.export.trace.traced import TracedMethod

TRIES = 64
_EDGES = (0, 1, 2)
_SEEDS = 4

ArgumentPosition = tuple[str, int]
Chosen = Mapping[ArgumentPosition, str]


@dataclass(frozen=True)
class DataSize:
    """A size of an operator's result that depends on data.

    Attributes:
        operator: The operator.
        number: Which of the method's calls of this operator, from 0.
        path: Where the size is in its result.
    """

    operator: torch._ops.OpOverload
    number: int
    path: KeyPath


def data_sizes(method: TracedMethod) -> list[DataSize]:
    """Returns the sizes that operators of a method find in data, in the order of its calls."""
    counts: Counter[object] = Counter()
    found = []
    for node in method.program.graph.nodes:
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        paths = (node.meta.get("unbacked_bindings") or {}).values()
        sizes = [path for path in paths if any(getattr(key, "name", "") == "size" for key in path)]
        found += [DataSize(node.target, counts[node.target], path) for path in sizes]
        counts[node.target] += 1
    return found


def sized_calls(
    sizes: Sequence[DataSize],
    draw: Callable[[int], list[DrawnCall]],
    change: Callable[[list[DrawnCall], Chosen, int], list[DrawnCall]],
    kinds: Callable[[Sequence[DrawnCall]], Mapping[ArgumentPosition, Sequence[str]]],
    answer: Callable[[Sequence[DrawnCall]], object],
) -> Iterator[list[tuple[list[DrawnCall], Chosen]]]:
    """Yields for each edge of each size the calls that reach it, those with the fewest changes first.

    Args:
        sizes: The sizes to look for.
        draw: Draws calls with a seed.
        change: Makes the inputs of calls be of certain kinds.
        kinds: The kinds that each input can be of.
        answer: Lets eager answer calls. It raises ExportError or UsageError where eager refuses them.
    """
    reached: dict[tuple[int, int], list[tuple[list[DrawnCall], Chosen]]] = defaultdict(list)
    for seed, chosen in itertools.islice(_plans(kinds(draw(0))), TRIES):
        seen = _Sizes(sizes)
        try:
            calls = draw(seed)
            calls = change(calls, chosen, seed) if chosen else calls
            with watched_by(seen):
                answer(calls)
        except (ExportError, UsageError):
            continue
        for position, size in seen.found.items():
            reached[position, size].append((calls, chosen))
    for position in range(len(sizes)):
        found = sorted(size for known, size in reached if known == position)
        for size in dict.fromkeys((*_EDGES, *found[-1:])):
            if (position, size) in reached:
                yield reached[position, size]


def _plans(kinds: Mapping[ArgumentPosition, Sequence[str]]) -> Iterator[tuple[int, dict[ArgumentPosition, str]]]:
    """Yields seeds and kinds: as drawn, one input changed, then two, with another seed each time."""
    yield from ((seed, {}) for seed in range(_SEEDS))
    seed = _SEEDS
    for changed in range(1, min(len(kinds), 2) + 1):
        for positions in itertools.combinations(kinds, changed):
            for chosen in itertools.product(*(kinds[position] for position in positions)):
                yield seed, dict(zip(positions, chosen))
                seed += 1


class _Sizes(OperatorMode):
    """Notes the sizes that operators find."""

    def __init__(self, wanted: Sequence[DataSize]) -> None:
        super().__init__()
        self._wanted = wanted
        self._counts: Counter[object] = Counter()
        self.found: dict[int, int] = {}

    def operator(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operator."""
        answer = func(*args, **kwargs)
        for position, each in enumerate(self._wanted):
            if each.operator is func and each.number == self._counts[func]:
                self.found[position] = int(key_get(answer, each.path))
        self._counts[func] += 1
        return answer
