"""Leaves operators to eager's kernels where Inductor would write code of its own."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.fx import traceback

from exportkit.errors import UsageError
from exportkit.export.torch_patches.patched import all_patched

EVERY = "aten"
"""Stands for all of torch's operators."""

_NAME = re.compile(r"(?:aten(?:\.|::))?(\w+)(?:\.(\w+))?")
_Table = Mapping[Any, Callable[..., Any]]

# Every kernel of a conversion rounds in the same way, and torch 2.11's C interface gives it a wrong dtype.
_CONVERSION = torch.ops.aten._to_copy.default


def read_eager_kernels(given: Sequence[str]) -> tuple[str, ...]:
    """Reads names of torch's operators, such as `aten.amin` (all its overloads) or `aten.div.Tensor`; `aten` is all.

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
        found += [f"aten.{match[1]}.{name}" for name in ([match[2]] if match[2] else overloads)]
    return tuple(dict.fromkeys(found))


def eager_kernels(operators: Sequence[str]) -> AbstractContextManager[None]:
    """Lets the compiled code call eager's kernels for these operators while the block runs.

    An operator that torch takes apart is called whole, if it has a kernel; if not, its parts are left to eager. Inputs
    and results are then stored in their own dtypes: nothing is fused with such an operator. `with_tensors` comes first.

    Args:
        operators: What `read_eager_kernels` returned.

    Raises:
        ExportError: This torch lacks a function that is replaced for that.
    """
    if not operators:
        return nullcontext()

    left = frozenset(operators)

    def kept(select: Callable[[], _Table]) -> Callable[[], _Table]:
        return lambda: {operator: _unless_left(operator, take_apart, left) for operator, take_apart in select().items()}

    def forced(falls_back: Callable[..., bool]) -> Callable[..., bool]:
        def decided(node: torch.fx.Node, *args: Any, **kwargs: Any) -> bool:
            return (_comes_from(node.target, node.meta, left) and _is_callable(node)) or falls_back(
                node, *args, **kwargs
            )

        return decided

    return all_patched(
        ("compile_fx.select_decomp_table", kept), ("graph.fallback_node_due_to_unsupported_type", forced)
    )


def with_tensors(module: torch.fx.GraphModule, operators: Sequence[str]) -> None:
    """Makes tensors of the numbers that such operators are given in place of tensors: a kernel takes no others.

    Args:
        module: The module of a program, which is changed.
        operators: What `read_eager_kernels` returned.
    """
    left = frozenset(operators)
    for node in [node for node in module.graph.nodes if _comes_from(node.target, {}, left) and has_kernel(node.target)]:
        for position in _numbers(node):
            given = node.args[position]
            with module.graph.inserting_before(node):
                made = module.graph.call_function(
                    torch.ops.aten.full.default, ([], given), {"dtype": _dtype(given, node), "device": _device(node)}
                )
            node.update_arg(position, made)
    module.recompile()


def _is_callable(node: torch.fx.Node) -> bool:
    """Whether the code can call a node's kernel: it takes a tensor, and no number in place of one."""
    takes = any(isinstance(each.meta.get("val"), torch.Tensor) for each in node.all_input_nodes)
    return takes and has_kernel(node.target) and not _numbers(node) and node.target != _CONVERSION


def _numbers(node: torch.fx.Node) -> list[int]:
    """Returns the positions of the arguments that are numbers, though the operator takes tensors."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]  # the target is an operator
    arguments = zip(range(len(node.args)), node.args, schema)
    return [n for n, given, wanted in arguments if str(wanted.type) == "Tensor" and isinstance(given, (int, float))]


def _dtype(number: float, node: torch.fx.Node) -> torch.dtype:
    """Returns the dtype of a tensor that changes the result's dtype as little as the number does."""
    if not isinstance(number, float):
        return torch.bool if isinstance(number, bool) else torch.int64
    values = [each.meta.get("val") for each in node.all_input_nodes]
    floating = any(isinstance(value, torch.Tensor) and value.is_floating_point() for value in values)
    return torch.float64 if floating else torch.get_default_dtype()


def _device(node: torch.fx.Node) -> torch.device:
    return next(each.meta["val"].device for each in node.all_input_nodes if isinstance(each.meta["val"], torch.Tensor))


def _unless_left(operator: Any, take_apart: Callable[..., Any], left: frozenset[str]) -> Callable[..., Any]:
    """Takes an operator apart, unless it or what it comes from is left to eager."""

    def decide(*args: Any, **kwargs: Any) -> Any:
        if _is_aten(operator) and _comes_from(operator, traceback.get_current_meta(), left):
            return NotImplemented
        return take_apart(*args, **kwargs)

    return decide


def _comes_from(target: Any, meta: Mapping[str, Any], left: frozenset[str]) -> bool:
    """Tells whether a node is one of the operators, or was made from one."""
    if EVERY in left or str(target) in left or str(meta.get("original_aten")) in left:
        return True
    return any(source.target in left for source in _sources(meta.get("from_node") or ()))


def _sources(sources: Sequence[Any]) -> Iterator[Any]:
    for source in sources:
        yield source
        yield from _sources(source.from_node)


def _is_aten(target: Any) -> bool:
    """Whether an operator has kernels in C++ that compiled code can call: those of `prims` are Python's."""
    return isinstance(target, torch._ops.OpOverload) and target.namespace == "aten"


def has_kernel(target: Any) -> bool:
    """Whether an operator computes tensors. A view computes nothing, and needs no kernel."""
    if not _is_aten(target):
        return False
    returns = target._schema.returns
    return bool(returns) and all("Tensor" in str(each.type) and each.alias_info is None for each in returns)
