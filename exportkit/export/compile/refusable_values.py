"""Tells from a program whether a value of its inputs could be refused, and lets attention do so (`refusing_code`)."""

from __future__ import annotations

import operator
from collections.abc import Container
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves
from torch.utils._sympy.value_ranges import ValueRanges

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
        return _attention_may_refuse(node, known)
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


# Attention with a `score_mod`, a `mask_mod` or a block mask, of torch.nn.attention.flex_attention.
ATTENTION = torch.ops.higher_order.flex_attention
_SCORE_MOD, _BLOCK_MASK, _OF_SCORE_MOD, _OF_MASK_MOD = 3, 4, 7, 8
_BLOCKS = ((2, 3), (4, 5))
"""Where a block mask has the blocks of keys that are masked in part, and whole ones: how many, and their numbers."""

_aten = torch.ops.aten


def _attention_may_refuse(node: torch.fx.Node, known: Container[torch.fx.Node]) -> bool:
    """Whether code of an attention may refuse a value of a tensor that is not known."""
    block_mask: Any = node.args[_BLOCK_MASK]
    blocks = [block_mask[place] for places in _BLOCKS for place in places]
    captured = node.args[_OF_SCORE_MOD] or node.args[_OF_MASK_MOD]
    return bool(captured) or any(each is not None and _follows_from_data(each, known, ()) for each in blocks)


def refuse_in_attention(module: torch.fx.GraphModule, memory: torch.fx.Node, constants: Container[str]) -> None:
    """Gives a module's attention the memory for refused values, and brings the blocks of its mask into range.

    Its kernels are templates, which read the tensors that they are given and no others. Blocks of constants that never
    change need no check.
    """
    graph, given = module.graph, set()
    for node in graph.find_nodes(op="call_function", target=ATTENTION):
        arguments: list[Any] = list(node.args)
        block_mask = list(arguments[_BLOCK_MASK])
        with graph.inserting_before(node):
            for counts, blocks in _BLOCKS:
                given_blocks = block_mask[counts], block_mask[blocks]
                if any(each is not None and _follows_from_data(each, (), constants) for each in given_blocks):
                    block_mask[counts], block_mask[blocks] = _in_range(node, *given_blocks)
        arguments[_BLOCK_MASK] = tuple(block_mask)
        for function, captured in ((arguments[_SCORE_MOD], _OF_SCORE_MOD), (block_mask[-1], _OF_MASK_MOD)):
            if not arguments[captured]:  # it reads no tensor
                continue
            arguments[captured] = (*arguments[captured], memory)
            if function.target not in given:
                given.add(function.target)
                _take_one_more(getattr(module, function.target), memory)
        node.args = tuple(arguments)


def _follows_from_data(node: torch.fx.Node, known: Container[torch.fx.Node], constants: Container[str]) -> bool:
    """Whether a tensor follows from an input or from state. Attention without a mask makes one of nothing."""
    waiting, seen = [node], set[torch.fx.Node]()
    while waiting:
        each = waiting.pop()
        if each in seen or each in known or (each.op == "get_attr" and each.target in constants):
            continue
        if each.op in ("placeholder", "get_attr"):
            return True
        seen.add(each)
        waiting += [given for given in each.all_input_nodes if not isinstance(given.meta.get("val"), torch.SymInt)]
    return False


def _take_one_more(function: torch.fx.GraphModule, memory: torch.fx.Node) -> None:
    """Gives a function one more argument, after its others."""
    last = function.graph.find_nodes(op="placeholder")[-1]
    with function.graph.inserting_after(last):
        function.graph.placeholder(memory.name).meta["val"] = memory.meta["val"]
    function.recompile()


def _in_range(attention: torch.fx.Node, counts: torch.fx.Node, blocks: torch.fx.Node) -> tuple[torch.fx.Node, ...]:
    """Looks up each count and each number of a block in a list of all numbers. `aten.index` refuses those not in it.

    Only as many numbers as the count says are read, so the others may be anything.
    """

    def call(function: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
        called = attention.graph.call_function(function, args, kwargs)
        called.meta["stack_trace"] = attention.meta.get("stack_trace")  # of the line that an error names
        return called

    options = {"dtype": blocks.meta["val"].dtype, "device": blocks.meta["val"].device}
    count = call(_aten.sym_size.int, blocks, 3)
    counts = call(_aten.index.Tensor, call(_aten.arange.default, call(operator.add, count, 1), **options), [counts])
    every = call(_aten.arange.default, count, **options)
    counted = call(_aten.lt.Tensor, every, call(_aten.unsqueeze.default, counts, -1))
    return counts, call(_aten.index.Tensor, every, [call(_aten.where.ScalarOther, counted, blocks, 0)])
