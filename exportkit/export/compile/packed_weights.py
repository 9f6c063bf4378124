"""Lets code for a CPU compute what the weights alone decide once, when it is loaded (docs/adr/0051).

torch keeps the weights of a linear layer by rows of outputs. For few samples, MKL multiplies up to four times as fast
with the transposed matrix. And a normalization divides by the root of its variance for every element. The package keeps
the weights as they are: the code computes the other order and the roots when it is loaded, and again for other weights.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.fx import Graph, Node

from exportkit.export.compile.load_time import computed_at_load

MOST_BYTES = 16 << 20  # of all transposed weights: each process has them in memory of its own
MOST_ELEMENTS = 1 << 16  # of a root or a quotient of weights

_CONTIGUOUS = {"memory_format": torch.contiguous_format}
_aten = torch.ops.aten
_SECOND: dict[Any, int] = {_aten.mm.default: 1, _aten.addmm.default: 2}  # the position of the second factor
_MOVES = {_aten.permute.default, _aten.reshape.default, _aten.view.default, _aten._unsafe_view.default}

_COSTLY = {_aten.sqrt.default, _aten.rsqrt.default, _aten.reciprocal.default, _aten.div.Tensor, _aten.exp.default}
_CHEAP = {_aten.add.Tensor, _aten.sub.Tensor, _aten.mul.Tensor, _aten.unsqueeze.default, *_MOVES}


def packed_weights() -> AbstractContextManager[None]:
    """Makes the change while the block runs."""
    return computed_at_load(pack, applies=lambda graph: bool(_copies(graph) or _products(graph) or _quotients(graph)))


def pack(graph: Graph) -> set[Node]:
    """Lets products take weights in another order. Returns the nodes that depend on weights alone."""
    computed = {node for copy in _copies(graph) for node in _way(copy)} | _quotients(graph)
    for product in _products(graph):
        factor = _factor(product)
        with graph.inserting_before(product):
            ordered = graph.call_function(_aten.clone.default, (factor,), dict(_CONTIGUOUS))
        ordered.meta["val"] = factor.meta["val"].clone(memory_format=torch.contiguous_format)
        product.update_arg(_SECOND[product.target], ordered)
        computed.update(_way(ordered))
    for product in graph.find_nodes(op="call_function", target=_aten.addmm.default):
        if _factor(product) in computed:
            _add_bias_apart(graph, product)
    return computed


def _copies(graph: Graph) -> list[Node]:
    """Finds contiguous copies of weights whose axes were exchanged, which the code would make in every call."""
    copies = graph.find_nodes(op="call_function", target=_aten.clone.default)
    return [node for node in copies if node.kwargs == _CONTIGUOUS and _way(node)]


def _quotients(graph: Graph) -> set[Node]:
    """Finds roots and quotients of weights, which the code would compute for every element, and what leads to them."""
    found: set[Node] = set()
    for node in graph.nodes:
        if node.target in _COSTLY and (way := _arithmetic(node)):
            found.update(way)
    return found


def _arithmetic(node: Node) -> set[Node]:
    """Returns a node and the nodes before it, if there is nothing but little arithmetic with weights; else nothing."""
    value = node.meta.get("val")
    if node.target not in _COSTLY | _CHEAP or not isinstance(value, torch.Tensor) or not node.all_input_nodes:
        return set()
    of_cpu = value.device.type == "cpu" and value.dtype.is_floating_point
    if not of_cpu or not value.dim() or not all(isinstance(size, int) for size in value.shape):
        return set()
    if value.numel() > MOST_ELEMENTS:
        return set()
    found = {node}
    for before in node.all_input_nodes:
        if before.op != "get_attr":
            way = _arithmetic(before)
            if not way:
                return set()
            found |= way
    return found


def _products(graph: Graph) -> list[Node]:
    """Finds the products with a transposed weight; none if their weights are large."""
    found = [
        product
        for target in _SECOND
        for product in graph.find_nodes(op="call_function", target=target)
        if _is_transposed(_factor(product))
    ]
    factors = [_factor(product) for product in found]
    sizes = {_way(factor)[-1].args[0]: factor.meta["val"].nbytes for factor in factors}  # by the weight
    return found if sum(sizes.values()) <= MOST_BYTES else []


def _factor(product: Node) -> Node:
    factor = product.args[_SECOND[product.target]]
    assert isinstance(factor, Node)
    return factor


def _is_transposed(factor: Node) -> bool:
    value = factor.meta["val"]
    of_cpu = value.device.type == "cpu" and value.dtype == torch.float32
    return of_cpu and bool(_way(factor)) and not value.is_contiguous()


def _way(node: Node) -> list[Node]:
    """Returns the nodes from this one back to the first that takes a weight; none if it is no reordered weight."""
    found = []
    while node.op == "call_function" and (node.target in _MOVES or node.target is _aten.clone.default):
        found.append(node)
        first = node.args[0]
        assert isinstance(first, Node)
        node = first
    return found if node.op == "get_attr" else []


def _add_bias_apart(graph: Graph, product: Node) -> None:
    """Adds a bias in the loop that comes next. `addmm` would copy it into the result first, for a microsecond."""
    bias, first, second = product.args
    assert isinstance(bias, Node)
    if product.kwargs or bias.meta["val"].dim() != 1:
        return
    with graph.inserting_before(product):
        alone = graph.call_function(_aten.mm.default, (first, second))
        total = graph.call_function(_aten.add.Tensor, (alone, bias))
    alone.meta["val"] = total.meta["val"] = product.meta["val"]
    product.replace_all_uses_with(total)
    graph.erase_node(product)
