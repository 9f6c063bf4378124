"""Finds matrix products of quantized weights that are computed in floating point."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch._ops import OpOverload

from exportkit.export.source_lines import where_traced

_NARROW = {torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2}
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "convolution", "conv1d", "conv2d"}
# What stands between a quantized weight and the product: it makes numbers of the weight's integers.
_BETWEEN = {
    *("to", "_to_copy", "type_as", "convert_element_type", "mul", "div", "sub", "add", "t", "transpose", "permute"),
    *("numpy_T", "view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "expand", "flatten", "unflatten", "clone"),
    *("contiguous", "slice", "select", "bitwise_and", "__and__", "__rshift__", "stack", "cat", "detach", "alias"),
}


def float_products(program: torch.export.ExportedProgram) -> list[str]:
    """Returns the lines, or modules, where weights of 8 bits and fewer are multiplied as floating numbers."""
    signature = program.graph_signature
    own = {*signature.inputs_to_parameters, *signature.inputs_to_buffers, *signature.inputs_to_lifted_tensor_constants}
    lines = []
    for node in program.graph.nodes:
        if _name(node) not in _PRODUCTS or not node.meta["val"].is_floating_point():
            continue
        if any(_is_narrow(leaf, own) for argument in node.all_input_nodes for leaf in _made_of(argument)):
            lines.append(where_traced(node) or _module(node))
    return list(dict.fromkeys(lines))


def _module(node: torch.fx.Node) -> str:
    """Returns the name of the module that a node is in, such as layers.0.projection."""
    stack = [name for name, _ in (node.meta.get("nn_module_stack") or {}).values()]
    return stack[-1] if stack and stack[-1] else node.name


def _is_narrow(node: torch.fx.Node, own: set[str]) -> bool:
    return node.op == "placeholder" and node.name in own and node.meta["val"].dtype in _NARROW


def _made_of(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """Yields what a factor is made of by casts, scales and views."""
    waiting, seen = [node], set()
    while waiting:
        each = waiting.pop()
        if each in seen:
            continue
        seen.add(each)
        yield each
        if _name(each) in _BETWEEN:
            waiting += each.all_input_nodes


def _name(node: torch.fx.Node) -> str:
    target = node.target
    return target._schema.name.partition("::")[2].rstrip("_") if isinstance(target, OpOverload) else ""
