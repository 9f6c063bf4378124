"""Which values compiled code passes to operators, and by which way: torch's proxy executor, or the dispatcher."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch._library.triton import triton_ops_to_kernels
from torch.utils._pytree import tree_leaves

from exportkit.errors import OperatorNotExportableError
from exportkit.export.models.program_model import graphs_of
from exportkit.export.models.source_lines import where_traced
from exportkit.export.torch_patches.dispatch import by_name
from exportkit.export.trace.preflight import is_custom, qualified_name
from exportkit.schema_text import innermost, schema_text


def check_calls(module: torch.nn.Module, device: torch.device) -> None:
    """Refuses a graph that gives an operator of a library a value that compiled code cannot pass."""
    for part in graphs_of(module):
        for node in part.graph.nodes:
            if is_custom(node.target) and node.target._schema.name not in triton_ops_to_kernels:
                _check_call(node, device.type)


def _check_call(node: torch.fx.Node, device: str) -> None:
    target: Any = node.target
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda each: each.meta.get("val"))
    given = {each.name: each.default_value for each in target._schema.arguments}
    given |= by_name(target, args, kwargs)
    dispatched = any(needs_dispatcher(each, given[each.name], device) for each in target._schema.arguments)
    for argument in target._schema.arguments:
        if refused := _refused(argument, given[argument.name], dispatched=dispatched):
            what, instead = refused
            at = f" (called at {where})" if (where := where_traced(node)) else ""
            raise OperatorNotExportableError(
                f"operator {qualified_name(target)}{at}: argument {argument.name} is {what}, and AOTInductor cannot "
                f"pass that: {schema_text(target._schema)}",
                hint=instead,
            )


def needs_dispatcher(argument: Any, value: object, device: str) -> bool:
    """Tells whether torch's proxy executor would pass something else than a value, or fail.

    It passes None for a list without elements and its own device for every device, and cannot read infinity or NaN.
    """
    if isinstance(value, (list, tuple)) and not value:
        return not is_default_list(argument, value)
    if isinstance(value, (list, tuple)):
        return any(needs_dispatcher(argument, each, device) for each in value)
    if isinstance(value, torch.device):
        return value.type != device
    return isinstance(value, float) and not math.isfinite(value)


def is_default_list(argument: Any, value: object) -> bool:
    """Tells whether a value is a list without elements that need not be passed, since the schema has it."""
    return isinstance(value, (list, tuple)) and not value and argument.default_value == []


def _refused(argument: Any, value: Any, *, dispatched: bool) -> tuple[str, str] | None:
    """Returns what a value is that cannot be passed, and what to write instead."""
    type_, around = innermost(argument)
    kind = type_.kind()
    if value is None:
        return None
    if kind == "GeneratorType":
        return "a Generator", "Take the random numbers as a tensor: a package draws others than eager does."
    if any(isinstance(each, (torch.SymFloat, torch.SymBool)) for each in tree_leaves(value)):
        return "a number that depends on the inputs", "Take it as a tensor without dimensions."
    if isinstance(value, complex) or value is torch.jagged:
        return str(value), "Leave it out, or take a tensor."
    beside = " in a call with an empty list, an infinite number or another device"
    if dispatched and kind == "NumberType":
        return f"the Scalar {value}{beside}", "Write float or SymInt in the schema."
    if dispatched and kind == "SymIntType" and "ListType" in around:
        return f"{value}{beside}", "Write int[] in the schema."
    return None
