"""Tells from a program whether a value of its inputs could be refused (see `refusing_code`)."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves
from torch.utils._sympy.value_ranges import ValueRanges

from exportkit.export.compile.attention_values import ATTENTION, attention_may_refuse
from exportkit.export.models.program_model import graphs_of

DIVISIONS = ("div", "rem", "mod")
"""What names of operators that divide integers have."""


def may_refuse(program: torch.export.ExportedProgram) -> bool:
    """Whether code of a program looks as if it may refuse a value."""
    signature, constants = program.graph_signature, constant_indices(program)
    targets = {**signature.inputs_to_buffers, **signature.inputs_to_lifted_tensor_constants}
    known = {node for node in program.graph.find_nodes(op="placeholder") if targets.get(node.name) in constants}
    nodes = (node for part in graphs_of(program.graph_module) for node in part.graph.nodes)
    return any(_may_refuse(node, known) for node in nodes if node.op == "call_function")


def _may_refuse(node: torch.fx.Node, known: Container[torch.fx.Node]) -> bool:
    if node.target is ATTENTION:
        return attention_may_refuse(node, known)
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace != "aten":
        return False
    name, value = node.target._schema.name, node.meta.get("val")
    integers = isinstance(value, torch.Tensor) and not value.is_floating_point()
    given = zip(node.target._schema.arguments, node.args)
    indices = tree_leaves([each for argument, each in given if "ind" in argument.name])  # index, indices
    return (
        any(isinstance(each, torch.fx.Node) and each not in known for each in indices)
        or "assert_async" in name
        or (integers and any(word in name for word in DIVISIONS))
    )


def constant_indices(program: torch.export.ExportedProgram) -> dict[str, torch.Tensor]:
    """Returns the integer tensors of a program that never change: no call writes them, and no swap replaces them."""
    changed = program.graph_signature.buffers_to_mutate.values()
    return {
        name: value
        for name, value in program.constants.items()
        if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)
        if value.dtype in (torch.int32, torch.int64) and value.numel() and name not in {*changed, *program.state_dict}
    }


def bounds_of(values: torch.Tensor) -> ValueRanges[Any]:
    """Returns between which numbers a kernel reads constants."""
    return ValueRanges(min(int(values.min()), 0), max(int(values.max()), 0))  # a masked load gives 0
