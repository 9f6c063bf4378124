"""Lays a recurrent layer's weights for a GPU out in one block, as cuDNN reads them, when code is loaded.

cuDNN takes the weights of a layer as one block of memory. torch makes it in each call where they lie apart, and prints
a warning. A package has a layer's weights one by one, as the model names them: the code makes the block once.

At every call torch compares the addresses with those that cuDNN asks for. Where another cuDNN asks for others, it makes
the block in each call again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch._inductor.graph import GraphLowering, getattr_recursive
from torch._inductor.lowering import fallback_handler
from torch._subclasses import FakeTensor
from torch.backends.cudnn import is_acceptable
from torch.backends.cudnn.rnn import get_cudnn_mode
from torch.fx import Graph, Node
from torch.utils._python_dispatch import _disable_current_modes

from exportkit.export.compile.load_time import computed_at_load
from exportkit.export.torch_patches.patched import Function, patched
from exportkit.recurrent import NAMESPACE

_aten = torch.ops.aten
_MODES = {"lstm": "LSTM", "gru": "GRU", "rnn_tanh": "RNN_TANH", "rnn_relu": "RNN_RELU"}


@contextmanager
def packed_rnn_weights() -> Iterator[None]:
    """Makes the change while the block runs."""

    def by_torch(call: Function, graph: GraphLowering, target: Any, *args: Any) -> Any:
        # Code that runs at load cannot have Triton's kernels: torch does not link them.
        if graph.is_const_graph and target is _aten.cat.default:
            return fallback_handler(target, add_to_fallback_set=False)(*args[0])
        return call(graph, target, *args)

    layouts = computed_at_load(lay_out, applies=lambda graph: bool(_layers(graph)))
    with layouts, patched("GraphLowering.call_function", by_torch):
        yield


@dataclass(frozen=True)
class Layer:
    """A call of our operator `kind`: the position of its weights, and these, in torch's order."""

    node: Node
    kind: str
    position: int
    weights: Sequence[Tensor]

    @property
    def sources(self) -> tuple[Node, ...]:
        """The nodes of the weights."""
        return tuple(cast(Sequence[Node], self.node.args[self.position]))


def lay_out(graph: Graph) -> set[Node]:
    """Lets recurrent layers take parts of a block as their weights. Returns the nodes that make the blocks."""
    computed: set[Node] = set()
    parts: dict[tuple[Node, ...], list[Node]] = {}
    for layer in _layers(graph):
        if layer.sources not in parts:
            with graph.inserting_before(layer.node):
                parts[layer.sources] = _parts(graph, layer.sources, cudnn_starts(layer), computed)
        layer.node.update_arg(layer.position, parts[layer.sources])
    return computed


def cudnn_starts(layer: Layer) -> list[int]:
    """Asks cuDNN at which element of a block each of a layer's weights begins."""
    after = layer.node.args[layer.position + 1 : layer.position + 4]
    biases, layers, bidirectional = cast(tuple[bool, int, bool], after)
    first, each = layer.weights[0], len(layer.weights) // (layers * (2 if bidirectional else 1))
    projects = each > (4 if biases else 2)
    gates = {"lstm": 4, "gru": 3}.get(layer.kind, 1)
    batch_first = False
    with _disable_current_modes(), torch.no_grad():
        placed = [torch.empty_like(weight) for weight in layer.weights]
        block = torch._cudnn_rnn_flatten_weight(
            placed,
            each,
            first.shape[1],
            get_cudnn_mode(_MODES[layer.kind]),
            first.shape[0] // gates,
            layer.weights[each - 1].shape[0] if projects else 0,
            layers,
            batch_first,
            bidirectional,
        )
    return [(weight.data_ptr() - block.data_ptr()) // block.element_size() for weight in placed]


def _layers(graph: Graph) -> list[Layer]:
    """Finds the layers that cuDNN computes with weights of the model, on a GPU that is here."""
    found = []
    module: Any = graph.owning_module
    for node in cast(Iterable[Any], graph.nodes):
        kind = node.target._schema.name if isinstance(node.target, torch._ops.OpOverload) else ""
        namespace, _, kind = kind.partition("::")
        if namespace != NAMESPACE or kind not in _MODES:
            continue
        position = 4 if kind == "lstm" else 3
        if all(source.op == "get_attr" for source in node.args[position]):
            weights: list[Any] = [getattr_recursive(module, source.target) for source in node.args[position]]
            if all(map(_is_of_cudnn, weights)):
                found.append(Layer(node, kind, position, weights))
    return found


def _is_of_cudnn(weight: Tensor) -> bool:
    return weight.is_cuda and not isinstance(weight, FakeTensor) and is_acceptable(weight)


def _parts(graph: Graph, weights: tuple[Node, ...], starts: Sequence[int], computed: set[Node]) -> list[Node]:
    """Writes the nodes that make a block, and those that are its parts."""

    def call(target: Any, *args: Any) -> Node:
        node = graph.call_function(target, args)
        node.meta["val"] = target(*torch.fx.node.map_arg(args, lambda given: given.meta["val"]))
        return node

    order = sorted(range(len(weights)), key=starts.__getitem__)
    pieces = [call(_aten.reshape.default, weights[which], [-1]) for which in order]
    block = call(_aten.cat.default, pieces)
    computed.update((*pieces, block))
    parts, end = {}, 0
    for which, piece in zip(order, pieces):
        begin, end = end, end + piece.meta["val"].numel()
        part = call(_aten.slice.Tensor, block, 0, begin, end)
        parts[which] = call(_aten.reshape.default, part, list(weights[which].meta["val"].shape))
    return [parts[which] for which in range(len(weights))]
