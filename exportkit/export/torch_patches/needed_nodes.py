"""Finds the nodes of a graph that a value depends on, writes into tensors included, or is a view of."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable

import torch


def needed_for(
    values: Iterable[torch.fx.Node], until: Callable[[torch.fx.Node], bool] = lambda node: False
) -> set[torch.fx.Node]:
    """Returns the nodes that must run for these values, themselves included.

    Nothing is needed that only a node of `until` depends on.
    """
    needed: set[torch.fx.Node] = set()
    waiting = list(values)
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            if not until(node):
                waiting += node.all_input_nodes
                # Whoever writes into a needed tensor, or into a view of it, is needed as well.
                waiting += [user for user in node.users if _writes_into(user, node)]
    return needed


def writes(node: torch.fx.Node) -> bool:
    """Tells whether a node writes into an argument."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def viewed(node: torch.fx.Node) -> torch.fx.Node:
    """Returns the node whose tensor a node is a view of, or the node."""
    while isinstance(node.target, torch._ops.OpOverload) and node.target.is_view and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _writes_into(user: torch.fx.Node, node: torch.fx.Node) -> bool:
    if not user.args or user.args[0] is not node:
        return False
    if writes(user):
        return True
    is_view = user.target is operator.getitem or getattr(user.target, "is_view", False)
    return is_view and any(_writes_into(deeper, user) for deeper in user.users)
