"""Compares two graphs, whatever format they were read from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from exportkit.diff.difference import Difference
from exportkit.diff.stored_tensors import StoredTensor


class UnreadableGraphError(ValueError):
    """A file has no graph of a form that can be read here."""


@dataclass(frozen=True)
class NodeMeaning:
    """One node of a graph.

    Attributes:
        operator: The operator, such as "aten.add.Tensor".
        name: The node's name, which means nothing for what it computes.
        where: The line of the model's source, or "".
        meaning: All that decides what it computes, in a form that does not depend on names.
    """

    operator: str
    name: str
    where: str
    meaning: str

    def __str__(self) -> str:
        return f"{self.operator} ({self.name}{f', {self.where}' if self.where else ''})"


@dataclass(frozen=True)
class GraphMeaning:
    """A graph and the tensors that it has inside.

    Attributes:
        nodes: All nodes in the order of the file.
        interface: Its inputs and outputs, in a form that does not depend on names.
        weights: Its weights by the names of the model's state.
        constants: Its other tensors by name.
        pickled: Digests of the records of its file that loading it may unpickle, by name.
    """

    nodes: tuple[NodeMeaning, ...]
    interface: str
    weights: Mapping[str, StoredTensor] = field(default_factory=dict)
    constants: Mapping[str, StoredTensor] = field(default_factory=dict)
    pickled: Mapping[str, str] = field(default_factory=dict)


def compare_graphs(a: GraphMeaning, b: GraphMeaning) -> Iterator[Difference]:
    """Compares how many nodes of each operator there are, and finds the first node that differs."""
    counts = [Counter(node.operator for node in side.nodes) for side in (a, b)]
    for operator in sorted(counts[0].keys() | counts[1].keys()):
        here, there = counts[0][operator], counts[1][operator]
        if here != there:
            yield Difference("graph", f"nodes of {operator}", str(here), str(there), "answer")
    for index, (one, other) in enumerate(zip(a.nodes, b.nodes)):
        if one.meaning != other.meaning:
            note = "they differ in their arguments or sizes" if one.operator == other.operator else None
            yield Difference("graph", f"first difference, node {index}", str(one), str(other), "answer", note)
            break
    else:
        if len(a.nodes) != len(b.nodes):
            index = min(len(a.nodes), len(b.nodes))
            ends = [str(side.nodes[index]) if index < len(side.nodes) else None for side in (a, b)]
            what, note = f"first difference, node {index}", "only one graph has it"
            yield Difference("graph", what, ends[0], ends[1], "answer", note)
    if a.interface != b.interface:
        yield Difference("graph", "inputs and outputs", "as in A", "as in B", "answer")
