"""Leaves operators to eager's kernels where Inductor would write code of its own."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.fx import traceback
from torch.utils._pytree import tree_leaves, tree_map_only

from exportkit.errors import UsageError
from exportkit.export.torch_patches.patched import Function, all_patched
from exportkit.package.compiled_with import EVERY

_NAME = re.compile(r"(?:aten(?:\.|::))?(\w+)(?:\.(\w+)(@\w+)?)?")
_NUMBERS = (int, float, torch.SymInt, torch.SymFloat)

# Every kernel of a conversion rounds in the same way, and torch 2.11's C interface gives it a wrong dtype.
_CONVERSION = torch.ops.aten._to_copy.default


def read_eager_kernels(given: Sequence[str]) -> tuple[str, ...]:
    """Reads names of torch's operators, such as `aten.amin` (all its overloads) or `aten.div.Tensor`; `aten` is all.

    `aten.div.Tensor@div_2` is the one of these at a place: the node of that name in the exported graph.

    Raises:
        UsageError: torch has no such operator.
    """
    found: list[str] = []
    for text in given:
        if text == EVERY:
            return (EVERY,)
        match = _NAME.fullmatch(text)
        packet = getattr(torch.ops.aten, match[1], None) if match else None
        if match is None or packet is None:
            close = difflib.get_close_matches(match[1] if match else text, dir(torch.ops.aten), n=3)
            raise UsageError(
                f"torch has no operator {text!r}",
                hint=f"Did you mean {', '.join(f'aten.{name}' for name in close)}?"
                if close
                else "Name one of torch's own operators, such as aten.amin or aten.div.Tensor.",
            )
        overloads = packet.overloads()
        if match[2] is not None and match[2] not in overloads:
            raise UsageError(f"aten.{match[1]} has no overload {match[2]!r}", hint=f"It has {', '.join(overloads)}.")
        found += [f"aten.{match[1]}.{name}{match[3] or ''}" for name in ([match[2]] if match[2] else overloads)]
    return tuple(dict.fromkeys(found))


def check_places(left: Sequence[str], programs: Iterable[torch.export.ExportedProgram]) -> None:
    """Checks that programs have the nodes that are left to eager.

    Raises:
        UsageError: There is no such node.
    """
    places = [_place(node) for program in programs for node in program.graph.nodes]
    for given in (text for text in left if "@" in text and text not in places):
        operator, _, name = given.partition("@")
        others = ", ".join([place for place in places if place.startswith(f"{operator}@")][:8])
        hint = f"It has {others}." if others else f"It never calls {operator}."
        raise UsageError(f"the graph has no node {name} that calls {operator}", hint=hint)


def can_leave(node: torch.fx.Node, program: torch.export.ExportedProgram) -> Iterator[str]:
    """Yields what leaves a node to eager, as `read_eager_kernels` reads it, if there is a kernel.

    That is the node of the program that it was made from, or its operator, if there is none, as in a branch's graph.
    """
    nodes = {_place(each): each for each in program.graph.nodes}
    made_from = [f"{source.target}@{source.name}" for source in _sources(node.meta.get("from_node") or ())]
    place = next((each for each in reversed(made_from) if each in nodes), None)
    if has_kernel(node.target) or (place is not None and has_kernel(nodes[place].target)):
        yield place or str(node.target)


def eager_kernels(operators: Sequence[str]) -> AbstractContextManager[None]:
    """Lets the compiled code call eager's kernels for these operators while the block runs.

    An operator that torch takes apart is called whole, if code can call it; if not, its parts are left to eager. Inputs
    and results are then stored in their own dtypes: nothing is fused with such an operator. `with_tensors` comes first.
    """
    if not operators:
        return nullcontext()

    left = frozenset(operators)

    def kept(select: Function) -> Mapping[Any, Function]:
        return {operator: partial(_unless_left, left, operator, apart) for operator, apart in select().items()}

    def forced(falls_back: Function, node: torch.fx.Node, *args: Any, **kwargs: Any) -> bool:
        leaves = _comes_from(node.target, node.meta, left) and _is_callable(node.target, _values(node))
        return leaves or falls_back(node, *args, **kwargs)

    return all_patched(
        ("compile_fx.select_decomp_table", kept), ("graph.fallback_node_due_to_unsupported_type", forced)
    )


def with_tensors(module: torch.fx.GraphModule, operators: Sequence[str]) -> None:
    """Makes tensors of the numbers that such operators are given in place of tensors: a kernel takes no others."""
    left = frozenset(operators)
    named = [node for node in module.graph.nodes if {EVERY, str(node.target), _place(node)} & left]
    for node in filter(lambda each: has_kernel(each.target), named):
        for position in _numbers(node.target, _values(node)):
            given, number = node.args[position], _values(node)[position]
            with module.graph.inserting_before(node):
                made = module.graph.call_function(
                    torch.ops.aten.full.default, ([], given), {"dtype": _dtype(number, node), "device": _device(node)}
                )
            node.update_arg(position, made)
    module.recompile()


def _is_callable(target: Any, args: Sequence[Any]) -> bool:
    """Whether the code can call an operator's kernel: it takes a tensor, and no number in place of one."""
    takes = any(isinstance(each, torch.Tensor) for each in tree_leaves(args))
    return takes and has_kernel(target) and not _numbers(target, args) and target != _CONVERSION


def _values(node: torch.fx.Node) -> tuple[Any, ...]:
    return tree_map_only(torch.fx.Node, lambda each: each.meta.get("val"), node.args)


def _numbers(target: torch._ops.OpOverload, args: Sequence[Any]) -> list[int]:
    """Returns the positions of the arguments that are numbers, though the operator takes tensors."""
    wanted = zip(args, target._schema.arguments)
    return [n for n, (given, each) in enumerate(wanted) if str(each.type) == "Tensor" and isinstance(given, _NUMBERS)]


def _dtype(number: float, node: torch.fx.Node) -> torch.dtype:
    """Returns the dtype of a tensor that changes the result's dtype as little as the number does."""
    if not isinstance(number, (float, torch.SymFloat)):
        return torch.bool if isinstance(number, bool) else torch.int64
    values = [each for each in tree_leaves(_values(node)) if isinstance(each, torch.Tensor)]
    floating = any(each.is_floating_point() or each.is_complex() for each in values)
    return torch.float64 if floating else torch.get_default_dtype()


def _device(node: torch.fx.Node) -> torch.device:
    return next(each.meta["val"].device for each in node.all_input_nodes if isinstance(each.meta["val"], torch.Tensor))


def _unless_left(left: frozenset[str], operator: Any, take_apart: Function, *args: Any, **kwargs: Any) -> Any:
    """Takes an operator apart, unless it or what it comes from is left to eager."""
    if _comes_from(operator, traceback.get_current_meta(), left) and _is_callable(operator, args):
        return NotImplemented
    return take_apart(*args, **kwargs)


def _comes_from(target: Any, meta: Mapping[str, Any], left: frozenset[str]) -> bool:
    """Tells whether a node is one of the operators, or was made from one."""
    if EVERY in left or str(target) in left or str(meta.get("original_aten")) in left:
        return True
    return any({s.target, f"{s.target}@{s.name}"} & left for s in _sources(meta.get("from_node") or ()))


def _place(node: torch.fx.Node) -> str:
    return f"{node.target}@{node.name}"


def _sources(sources: Sequence[Any]) -> Iterator[Any]:
    for source in sources:
        yield source
        yield from _sources(source.from_node)


def has_kernel(target: Any) -> bool:
    """Whether an operator computes tensors. A view computes nothing, and needs no kernel."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":  # kernels of prims are Python's
        return False
    returns = target._schema.returns
    return bool(returns) and all("Tensor" in str(each.type) and each.alias_info is None for each in returns)
