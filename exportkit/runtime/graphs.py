"""CUDA graphs of a loaded model: which sizes have one. csrc/runtime/graphs.h runs them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import torch

from exportkit.errors import UsageError
from exportkit.package.manifest import Call, StateTensor, TensorInput
from exportkit.sizes import checked_sizes, shape_at, sizes_of

Described = TensorInput | StateTensor
CudaGraphs = bool | Sequence[Mapping[str, int]]
GraphUse = Literal["none", "captured", "first-use"]  # the names in csrc/runtime/dispatcher.cpp


@dataclass(frozen=True)
class CudaGraph:
    """A graph, or sizes that run without one.

    Attributes:
        method: The method that was called.
        sizes: The value of each dimension, by name.
        uses: How often calls used it lately: older uses count less.
        copies_inputs: Whether a call copies its inputs to the graph's own, unless it is called with these. Other graphs
            read inputs where they are.
        reason: Why calls of these sizes cannot be one; empty for a graph.
    """

    method: str
    sizes: Mapping[str, int]
    uses: int
    copies_inputs: bool
    reason: str = ""


@dataclass(frozen=True)
class GraphReport:
    """The graphs of a model.

    Attributes:
        memory: Bytes of GPU memory that the graphs' calls share. The graphs' inputs come on top.
        graphs: The graphs.
        refused: The sizes that were tried and cannot have one.
    """

    memory: int
    graphs: tuple[CudaGraph, ...]
    refused: tuple[CudaGraph, ...]


class _Graph(msgspec.Struct):
    shapes: list[list[int]]
    uses: int = 0
    copies_inputs: bool = False
    reason: str = ""


class _Report(msgspec.Struct):
    memory: int
    graphs: list[_Graph]
    refused: list[_Graph]


def graph_use(cuda_graphs: CudaGraphs) -> GraphUse:
    """Returns what `exportkit.load` was asked for. Raises UsageError if that is not what it takes."""
    if isinstance(cuda_graphs, bool):
        return "first-use" if cuda_graphs else "none"
    if not isinstance(cuda_graphs, (list, tuple)) or not all(isinstance(sizes, Mapping) for sizes in cuda_graphs):
        said = f"cuda_graphs must be True, False or a list of sizes, got {cuda_graphs!r}"
        raise UsageError(said, hint='A list of sizes is such as [{"batch": 1, "gh": 28, "gw": 28}].')
    return "captured"


def graph_report(texts: Mapping[str, str], described: Mapping[str, Sequence[Described]]) -> GraphReport:
    """Reads what the C++ runtime reports of each method's code, whose arguments are described."""
    memory, graphs, refused = 0, list[CudaGraph](), list[CudaGraph]()
    for name, text in texts.items():
        report = msgspec.json.decode(text, type=_Report)
        memory += report.memory
        for found, given in ((graphs, report.graphs), (refused, report.refused)):
            for each in given:
                sizes = sizes_of(described[name], each.shapes)
                found.append(CudaGraph(name, sizes, each.uses, each.copies_inputs, each.reason))
    return GraphReport(memory, tuple(graphs), tuple(refused))


def empty_inputs(call: Call, sizes: Mapping[str, int], device: torch.device) -> list[torch.Tensor]:
    """Returns inputs of the given sizes and any values.

    Raises:
        UsageError: A dimension is missing, unknown, or out of its range.
    """
    checked_sizes("the package", {each.name: (each.min, each.max) for each in call.dimensions}, sizes)
    return [
        torch.empty(shape_at(tensor, sizes), dtype=getattr(torch, tensor.dtype), device=device)
        for tensor in call.inputs
    ]
