"""Keeps torch's fast attention away from sequences that may be empty: on a CPU, its kernel divides by their length."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import sympy
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from exportkit.export.models.program_model import graphs_of

_ATTENTION = (
    torch.ops.aten.scaled_dot_product_attention.default,
    torch.ops.aten.softmax.int,  # which Inductor looks for, with the products around it
    torch.ops.aten._softmax.default,
)


def attention_of_any_length(program: torch.export.ExportedProgram) -> AbstractContextManager[None]:
    """Lets attention be products of matrices while the block runs, if a size of its inputs may be 0 in a program."""
    may_be_empty = any(
        _may_be_0(size, program)
        for part in graphs_of(program.graph_module)
        for node in part.graph.nodes
        if node.target in _ATTENTION
        for each in node.all_input_nodes
        for size in each.meta["val"].shape
    )
    return sdpa_kernel(SDPBackend.MATH) if may_be_empty else nullcontext()


def _may_be_0(size: int | torch.SymInt, program: torch.export.ExportedProgram) -> bool:
    if not isinstance(size, torch.SymInt):
        return size == 0
    ranges = program.range_constraints
    least = {
        symbol: ranges[symbol].lower if symbol in ranges else sympy.Integer(0) for symbol in size.node.expr.free_symbols
    }
    return size.node.expr.xreplace(least) == 0
