"""Groups the nodes of a graph by the module whose forward made them.

A group is a run of nodes that follow each other in the program. Therefore arrows between groups never form a circle,
and a module that is called twice is two groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

_WIDEST = 160  # nodes of a group that are drawn side by side; more are divided into parts
_DEEPEST = 40


@dataclass(frozen=True)
class Stack:
    """The modules whose forward was running, the outermost first: their paths and the names of their classes."""

    paths: tuple[str, ...]
    classes: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Stack | None:
        """Parses a nn_module_stack: `key,path,class` joined by `;`. None if a pass of torch made the node."""
        if not text or text.startswith("_empty_nn_module_stack"):
            return None
        paths, classes = [], []
        for entry in text.split(";")[:_DEEPEST]:
            _, _, rest = entry.partition(",")
            path, _, kind = rest.rpartition(",")
            if path:
                paths.append(path)
                classes.append(kind.rpartition(".")[2])
        return cls(tuple(paths), tuple(classes))


def tree_of(stacks: Sequence[Stack | None]) -> dict[str, Any]:
    """Returns the groups as a tree: {"path", "name", "class", "items"}, where an item is a group or a node's number.

    A node that no module made is in the innermost group that both its neighbours are in.
    """
    filled = _filled(stacks)
    return {"path": "", "name": "", "class": "", "items": _items(list(range(len(filled))), filled, 0)}


def _filled(stacks: Sequence[Stack | None]) -> list[Stack]:
    after: list[Stack | None] = [None] * len(stacks)
    upcoming: Stack | None = None
    for number in reversed(range(len(stacks))):
        after[number] = upcoming = stacks[number] or upcoming
    nothing = Stack((), ())
    filled: list[Stack] = []
    before = nothing
    for number, stack in enumerate(stacks):
        before = stack or _common(before, after[number] or nothing)
        filled.append(before)
    return filled


def _common(one: Stack, other: Stack) -> Stack:
    same = 0
    for mine, theirs in zip(one.paths, other.paths):
        if mine != theirs:
            break
        same += 1
    return Stack(one.paths[:same], one.classes[:same])


def _items(numbers: Sequence[int], stacks: Sequence[Stack], depth: int) -> list[Any]:
    def path_at(number: int) -> str | None:
        paths = stacks[number].paths
        return paths[depth] if len(paths) > depth else None

    items: list[Any] = []
    for path, run in groupby(numbers, key=path_at):
        members = list(run)
        if path is None:
            items += members
            continue
        stack = stacks[members[0]]
        parent = stack.paths[depth - 1] if depth else ""
        name = path.removeprefix(f"{parent}.") if parent else path
        group = {"path": path, "name": name, "class": stack.classes[depth], "items": _items(members, stacks, depth + 1)}
        items.append(group)
    return _divided(items)


def _divided(items: list[Any]) -> list[Any]:
    """Divides a wide group into parts, and these into parts, until none is wide."""
    while len(items) > _WIDEST:
        count = -(-len(items) // _WIDEST)
        size = -(-len(items) // count)
        parts = [items[start : start + size] for start in range(0, len(items), size)]
        items = [
            {"path": "", "name": f"part {number} of {len(parts)}", "class": "", "items": part}
            for number, part in enumerate(parts, 1)
        ]
    return items
