"""Writes out operators that are Python functions of torch's operators: hosts do not have their source."""

from __future__ import annotations

from functools import partial

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule

from exportkit.export.within_torch.quiet import quiet_torch
from exportkit.libraries import TORCH_NAMESPACES

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


def is_written_out(operator: object) -> bool:
    """Returns whether an operator is a Python function that torch sees into, as torchao's are."""
    if not isinstance(operator, OpOverload) or operator.namespace in TORCH_NAMESPACES:
        return False
    namespace, _, name = operator._schema.name.partition("::")
    overload = operator._schema.overload_name
    key = f"{namespace}/{name}{'.' + overload if overload else ''}/CompositeImplicitAutograd"
    return key in torch.library._impls


def written_out(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Returns a program with what such operators call in their place."""
    nodes = [
        node for part in program.graph_module.modules() if isinstance(part, GraphModule) for node in part.graph.nodes
    ]
    found = {node.target for node in nodes if is_written_out(node.target)}
    if not found:
        return program
    with quiet_torch():
        return program.run_decompositions({each: partial(each._op_dk, _COMPOSITE) for each in found})
