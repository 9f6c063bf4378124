"""Lets code for a CPU keep weights in the order that matrix products read fastest (docs/adr/0051).

torch keeps the weights of a linear layer by rows of outputs. For few samples, MKL multiplies up to four times as fast
with the transposed matrix. The package keeps the weights as they are: the code computes the other order once when it is
loaded, and again for other weights. AOTInductor calls this constant folding at run time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._inductor import compile_fx, config
from torch.fx import Graph, GraphModule, Node

from exportkit.export.torch_internals import replaced

MOST_BYTES = 16 << 20  # of all weights in another order: each process has them in memory of its own

_aten = torch.ops.aten
_SECOND = {_aten.mm.default: 1, _aten.addmm.default: 2}  # the place of the second factor
_MOVES = (_aten.permute.default, _aten.reshape.default, _aten.view.default, _aten._unsafe_view.default)
_CONTIGUOUS = {"memory_format": torch.contiguous_format}


@contextmanager
def packed_weights() -> Iterator[None]:
    """Makes the change while the block runs."""

    def packing(split: Callable[..., Any]) -> Callable[..., Any]:
        def packed(module: GraphModule, *args: Any, **kwargs: Any) -> Any:
            computed = pack(module.graph)
            module.recompile()
            skip = kwargs.get("skip_folding_node_fn") or (lambda node: False)
            kwargs["skip_folding_node_fn"] = lambda node: skip(node) or node.op != "get_attr" and node not in computed
            return split(module, *args, **kwargs)

        return packed

    folding = "aot_inductor.use_runtime_constant_folding"

    def decide(graph: Graph) -> None:  # is called for the whole graph last, after its branches and bodies
        config.aot_inductor.use_runtime_constant_folding = bool(_orders(graph) or _factors(graph))

    with ExitStack() as changes:
        changes.enter_context(config.patch({folding: False, "post_grad_custom_post_pass": decide}))
        changes.enter_context(replaced(compile_fx, "split_const_gm", packing))
        yield


def pack(graph: Graph) -> set[Node]:
    """Changes a graph so that its products take weights in another order.

    Returns:
        The nodes that compute that order, which depends on the weights alone.
    """
    computed: set[Node] = set()
    for node in _orders(graph):
        computed.update(_way(node))
    for product in _factors(graph):
        place = _SECOND[product.target]
        factor = product.args[place]
        assert isinstance(factor, Node)
        with graph.inserting_before(product):
            ordered = graph.call_function(_aten.clone.default, (factor,), dict(_CONTIGUOUS))
        ordered.meta["val"] = factor.meta["val"].clone(memory_format=torch.contiguous_format)
        product.update_arg(place, ordered)
        computed.update(_way(ordered))
    for product in graph.find_nodes(op="call_function", target=_aten.addmm.default):
        if product.args[2] in computed:
            _add_bias_apart(graph, product)
    return computed


def _orders(graph: Graph) -> list[Node]:
    """Finds contiguous copies of weights whose axes were exchanged, which the code would make in every call."""
    copies = graph.find_nodes(op="call_function", target=_aten.clone.default)
    return [node for node in copies if node.kwargs == _CONTIGUOUS and _way(node)]


def _factors(graph: Graph) -> list[Node]:
    """Finds the products with a transposed weight; none if their weights are large."""
    products = [
        product
        for target, place in _SECOND.items()
        for product in graph.find_nodes(op="call_function", target=target)
        if _is_transposed(product.args[place])
    ]
    weights = {_way(product.args[_SECOND[product.target]])[-1]: product for product in products}
    size = sum(product.args[_SECOND[product.target]].meta["val"].nbytes for product in weights.values())
    return products if size <= MOST_BYTES else []


def _is_transposed(factor: Any) -> bool:
    value = factor.meta["val"]
    of_cpu = value.device.type == "cpu" and value.dtype == torch.float32
    return of_cpu and bool(_way(factor)) and not value.is_contiguous()


def _way(node: Node) -> list[Node]:
    """Returns the nodes from this one back to the first that takes a weight; none if it is no reordered weight."""
    found = []
    while node.op == "call_function" and (node.target in _MOVES or node.target is _aten.clone.default):
        found.append(node)
        node = node.args[0]  # type: ignore[assignment]
    return found if node.op == "get_attr" else []


def _add_bias_apart(graph: Graph, product: Node) -> None:
    """Adds a bias in the loop that comes next. `addmm` would copy it into the result first, which costs a microsecond."""
    bias, first, second = product.args
    if product.kwargs or bias.meta["val"].dim() != 1:  # type: ignore[union-attr]
        return
    with graph.inserting_before(product):
        alone = graph.call_function(_aten.mm.default, (first, second))
        alone.meta["val"] = product.meta["val"]
        total = graph.call_function(_aten.add.Tensor, (alone, bias))
        total.meta["val"] = product.meta["val"]
    product.replace_all_uses_with(total)
    graph.erase_node(product)
