"""Finds matrix products of quantized weights that are computed in floating point."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch._ops import OpOverload

from exportkit.export.models.source_lines import where_traced

_NARROW = {torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2}
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "convolution", "conv1d", "conv2d"}
# What stands between a quantized weight and the product: it makes numbers of the weight's integers.
_BETWEEN = {
    *("to", "_to_copy", "type_as", "convert_element_type", "mul", "div", "sub", "add", "t", "transpose", "permute"),
    *("numpy_T", "view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "expand", "flatten", "unflatten", "clone"),
    *("contiguous", "slice", "select", "bitwise_and", "__and__", "__rshift__", "stack", "cat", "detach", "alias"),
}

_SAME_NUMBERS = {"to", "_to_copy", "view", "_unsafe_view", "reshape", "flatten", "unflatten"}


def float_products(program: torch.export.ExportedProgram) -> list[str]:
    """Says where weights of 8 bits and fewer are multiplied as floating numbers, and what would take a kernel.

    Inductor takes its kernel for int8 weights where it finds the product in the form that the kernel computes.
    """
    signature = program.graph_signature
    own = {*signature.inputs_to_parameters, *signature.inputs_to_buffers, *signature.inputs_to_lifted_tensor_constants}
    lines = []
    for node in program.graph.nodes:
        if _name(node) not in _PRODUCTS or not node.meta["val"].is_floating_point():
            continue
        leaves = [leaf for argument in node.all_input_nodes for leaf in _made_of(argument)]
        stored_ones = (leaf for leaf in leaves if leaf.op == "placeholder" and leaf.name in own)
        weight = next((leaf for leaf in stored_ones if leaf.meta["val"].dtype in _NARROW), None)
        if weight is None or _takes_the_kernel(node, weight):
            continue
        stored, computed = (str(each.meta["val"].dtype)[6:] for each in (weight, node))
        advice = _FLOAT8 if stored.startswith("float8") else _INT8
        line = where_traced(node)
        where = f"at {line}" if line else f"in module {_module(node)}"
        lines.append(f"{stored} weights are multiplied as {computed} {where}; {advice}")
    return list(dict.fromkeys(lines))


_INT8 = (
    "torch has a kernel for int8 weights with bfloat16 inputs, if scales in bfloat16, one for each row of the weight, "
    "multiply the product and not the weight"
)
_FLOAT8 = "torch multiplies float8 by float8, on CUDA from compute capability 8.9: quantize the inputs as well"


def _takes_the_kernel(product: torch.fx.Node, weight: torch.fx.Node) -> bool:
    """Whether Inductor computes a product with the kernel for int8 weights: (x @ weight.to(bfloat16).T) * scales."""
    if weight.meta["val"].dtype != torch.int8 or product.meta["val"].dtype != torch.bfloat16:
        return False
    made = {_name(node) for argument in product.all_input_nodes[1:] for node in _made_of(argument)}
    if _name(product) not in ("mm", "bmm", "matmul", "linear") or made & {"mul", "div", "add", "sub"}:
        return False
    node = product
    while len(users := [each for each in node.users if _name(each) != "_assert_tensor_metadata"]) == 1:
        node = users[0]
        if _name(node) == "mul":
            return all(each.meta["val"].dtype == torch.bfloat16 for each in node.all_input_nodes)
        if _name(node) not in _SAME_NUMBERS:
            return False
    return False


def _module(node: torch.fx.Node) -> str:
    """Returns the name of the module that a node is in, such as layers.0.projection."""
    stack = [name for name, _ in (node.meta.get("nn_module_stack") or {}).values()]
    return stack[-1] if stack and stack[-1] else node.name


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
