"""Corrects the graphs of loops and branches within a traced program: torch writes and compiles few kinds of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.utils._pytree import tree_leaves

from exportkit.errors import ExportError
from exportkit.export.models.source_lines import where_traced
from exportkit.export.torch_patches.needed_nodes import viewed

_VMAP = "torch._functorch.predispatch"  # the module of what torch.vmap leaves in a graph
_LIFTS = (torch.ops.aten.lift_fresh_copy.default, torch.ops.aten.lift_fresh.default)


def correct_branches(program: torch.export.ExportedProgram) -> None:
    """Lets a traced program with loops and branches be run, written to a file and compiled, in place.

    A number that is made within a branch is no constant of it, and no result of a branch is an argument of it.
    """
    whole = program.graph_module
    for caller, name, graph in list(_branches(whole)):
        for node in list(graph.graph.nodes):
            if getattr(node.target, "__module__", None) == _VMAP:
                at = where_traced(caller)
                raise ExportError(
                    f"torch.vmap is called within {name}{at and f' at {at}'}, and torch.export loses there the "
                    "dimension that it maps",
                    hint="Write that body for all rows at once, with operators that take a batch, or vmap outside.",
                )
            if node.op == "get_attr" and isinstance(value := getattr(graph, str(node.target), None), torch.Tensor):
                _make_number(graph, node, value)
        _copy_arguments(graph)
        graph.graph.eliminate_dead_code()
        graph.recompile()


def flow_nodes(module: torch.fx.GraphModule) -> list[tuple[str, str]]:
    """Returns torch's name of each loop and branch in a graph, those within others included, and its line."""
    found = [(name, where_traced(caller)) for caller, name, _ in _branches(module)]
    return list(dict.fromkeys(found))


def _branches(module: torch.fx.GraphModule) -> Iterator[tuple[torch.fx.Node, str, torch.fx.GraphModule]]:
    """Yields the graphs of loops and branches at any depth: the node that calls one, its operator's name, the graph."""
    for node in module.graph.nodes:
        if not isinstance(node.target, HigherOrderOperator):
            continue
        for argument in tree_leaves((node.args, node.kwargs)):
            if isinstance(argument, torch.fx.Node) and argument.op == "get_attr":
                graph = getattr(module, str(argument.target), None)
                if isinstance(graph, torch.fx.GraphModule):
                    yield node, node.target.name(), graph
                    yield from _branches(graph)


def _make_number(graph: torch.fx.GraphModule, node: torch.fx.Node, value: torch.Tensor) -> None:
    """Replaces a constant of one element by an operator that makes it. torch does not write a branch's constants."""
    if value.numel() != 1 or value.dtype.is_complex:
        return
    with graph.graph.inserting_before(node):
        options: dict[str, Any] = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
        made = graph.graph.call_function(torch.ops.aten.full.default, (list(value.shape), value.item()), options)
    made.meta = dict(node.meta)
    if "val" not in made.meta:
        users = [user.meta["val"] for user in node.users if isinstance(user.meta.get("val"), torch.Tensor)]
        made.meta["val"] = users[0] if users else value
    node.replace_all_uses_with(made)
    for user in list(made.users):
        if user.target in _LIFTS:
            user.replace_all_uses_with(made)
            graph.graph.erase_node(user)
    graph.graph.erase_node(node)


def _copy_arguments(graph: torch.fx.GraphModule) -> None:
    """Returns copies of arguments, and of what is returned before, which AOTInductor refuses."""
    output = graph.graph.output_node()
    seen: set[torch.fx.Node] = set()

    def own(node: Any) -> Any:
        if not isinstance(node, torch.fx.Node) or not isinstance(node.meta.get("val"), torch.Tensor):
            return node
        if node not in seen and viewed(node).op not in ("placeholder", "get_attr"):
            seen.add(node)
            return node
        with graph.graph.inserting_before(output):
            copy = graph.graph.call_function(torch.ops.aten.clone.default, (node,))
        copy.meta = dict(node.meta)
        return copy

    output.args = tuple(torch.fx.node.map_aggregate(argument, own) for argument in output.args)


def hand_over_sizes(module: torch.fx.GraphModule) -> None:
    """Gives each scan the sizes that its results have as arguments: AOTInductor looks for them there, and nowhere else.

    Dynamo does so where it traces a whole model, torch.export does not.
    """
    for node in list(module.graph.nodes):
        if node.target is not torch.ops.higher_order.scan:
            continue
        body, init, slices, others = node.args
        graph = getattr(module, body.target)
        sizes: dict[Any, tuple[torch.fx.Node, int, torch.SymInt]] = {}
        for tensor in (*init, *slices, *others):
            value = tensor.meta.get("val")
            shape: Sequence[Any] = value.shape if isinstance(value, torch.Tensor) else ()
            for dim, size in enumerate(shape):
                if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                    sizes.setdefault(size.node.expr, (tensor, dim, size))
        given = []
        for tensor, dim, size in sizes.values():
            with module.graph.inserting_before(node):
                asked = module.graph.call_function(torch.ops.aten.sym_size.int, (tensor, dim))
            asked.meta["val"] = size
            given.append(asked)
            with graph.graph.inserting_before(next(each for each in graph.graph.nodes if each.op != "placeholder")):
                place = graph.graph.placeholder(f"size_{len(list(graph.graph.find_nodes(op='placeholder')))}")
            place.meta["val"] = size
        if given:
            node.args = (body, init, slices, (*others, *given))
            graph.recompile()
    module.recompile()
