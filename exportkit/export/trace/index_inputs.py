"""Finds the integers among a model's inputs that other values than the example's could lead out of memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from exportkit.export.models.program_model import taken
from exportkit.export.record.eager_methods import EagerMethods
from exportkit.export.record.edge_values import SMALL_INTEGERS
from exportkit.export.torch_patches.needed_nodes import needed_for
from exportkit.export.trace.preflight import is_custom
from exportkit.export.trace.traced import TracedMethod

# They refuse an index that is out of range on a CPU, and on a GPU they end the process.
_INDEXING = {
    *("embedding", "_embedding_bag", "index", "_unsafe_index", "index_select", "index_put", "_unsafe_index_put"),
    *("index_add", "index_copy", "index_fill", "gather", "scatter", "scatter_add", "scatter_reduce", "take", "put"),
    *("one_hot", "bincount", "repeat_interleave", "nll_loss_forward"),
}


def index_inputs(eager: EagerMethods, traced: Sequence[TracedMethod]) -> frozenset[tuple[str, int]]:
    """Returns the inputs of integers that must keep the values they are drawn with: methods, and positions in the call.

    Integers of 8 and 16 bits do if they are indices. Larger ones do if the spec draws the inputs, because they may
    depend on one another, such as offsets, and if a custom operator takes them, which may not check them.
    """
    found: set[tuple[str, int]] = set()
    for method in traced:
        by_author = eager.specs[method.name].draw_inputs is not None
        by_author |= bool(method.state) and eager.spec.draw_sequence is not None
        indices, custom = (_integers_before(method.program.graph_module, sinks) for sinks in (_indexes, _is_custom))
        for position, (name, tensor) in enumerate(zip(taken(method.program), method.call.inputs)):
            small = getattr(torch, tensor.dtype) in SMALL_INTEGERS
            if name in indices if small else by_author or name in custom:
                found.add((method.name, position))
    return frozenset(found)


def _integers_before(module: torch.fx.GraphModule, is_sink: Callable[[torch.fx.Node], bool]) -> set[str]:
    """Returns the names of the nodes from which integers come to a sink."""
    # A graph within another is not followed: all that goes into it counts.
    sinks = (n for n in module.graph.nodes if is_sink(n) or isinstance(n.target, torch._ops.HigherOrderOperator))
    leaves = [leaf for node in sinks for leaf in node.all_input_nodes if _is_integer(leaf)]
    found = needed_for(leaves, until=lambda node: not _is_integer(node))
    return {node.name for node in found if _is_integer(node)}


def _indexes(node: torch.fx.Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target.overloadpacket.__name__.rstrip("_") in _INDEXING


def _is_custom(node: torch.fx.Node) -> bool:
    return is_custom(node.target)


def _is_integer(node: torch.fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and not (
        value.is_floating_point() or value.is_complex() or value.dtype is torch.bool
    )
