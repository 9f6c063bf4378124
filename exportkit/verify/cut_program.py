"""Cuts an exported program after one of its nodes: what the rest would read becomes the program's result."""

from __future__ import annotations

import copy
import operator
from collections.abc import Sequence

import msgspec
import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, OutputKind, OutputSpec, TensorArgument
from torch.utils._pytree import tree_structure

from exportkit.errors import ExportError
from exportkit.export.models.placement import parse_floating
from exportkit.export.models.program_model import rebuilt
from exportkit.export.record.cases import check_packable
from exportkit.export.record.tolerances import output_tolerances
from exportkit.package.manifest import Call, MappingNode, Source, TensorNode, TensorOutput

DECISION = "exportkit_decision"
"""In the meta of a node: what reads it takes eager's value instead, so that only a cut that returns it compares it."""

_NESTING = {"_vmap_increment_nesting": 1, "_vmap_decrement_nesting": -1}  # in which vmap begins and ends


def cut_points(program: ExportedProgram) -> list[torch.fx.Node]:
    """Returns the nodes that compute tensors, in the order of the graph. A program can be cut after each.

    Not inside of torch.vmap, as in a mask of flex_attention: no program returns what has a hidden dimension, and a
    program that is cut there would leave everything that its process computes later inside of it.
    """
    points: list[torch.fx.Node] = []
    inside = 0
    for node in program.graph.nodes:
        if node.op == "call_function":
            inside += _NESTING.get(getattr(node.target, "__name__", ""), 0)
            if not inside and not _is_part(node) and _returns_tensors(node):
                points.append(node)
    return points


def own_values(point: torch.fx.Node) -> tuple[str, ...]:
    """Returns the names of the values that a node's result consists of."""
    return (point.name, *(user.name for user in point.users if _is_part(user) and user.users))


def values_after(program: ExportedProgram, point: torch.fx.Node) -> list[torch.fx.Node]:
    """Returns the tensors that the nodes up to a point have computed and that are read later, and the point's own.

    A tensor whose dtype no package can hold is left out.
    """
    computed = _up_to(program, point)
    found = []
    for node in computed:
        value = node.meta.get("val")
        own = node is point or (
            _is_part(node) and node.args[0] is point and node.users
        )  # Inductor may not return others
        later = DECISION in node.meta or any(user not in computed for user in node.users)
        if isinstance(value, torch.Tensor) and (own or later):
            try:
                check_packable(node.name, value.dtype)
            except ExportError:
                continue
            found.append(node)
    return found


def cut_after(program: ExportedProgram, point: torch.fx.Node) -> ExportedProgram:
    """Returns a program that computes `values_after` a point and nothing that comes later.

    Raises:
        ExportError: No value at that point can be the result of a program.
    """
    values = values_after(program, point)
    if not values:
        raise ExportError(f"no tensor that is known after {point.name} can be stored")
    return computing(program, values)


def computing(program: ExportedProgram, values: Sequence[torch.fx.Node]) -> ExportedProgram:
    """Returns a program that computes values of a program, by their names, and nothing else."""
    kept = {node.name for value in values for node in _up_to(program, value)}
    module = copy.deepcopy(program.graph_module)
    graph = module.graph
    by_name = {node.name: node for node in graph.nodes}
    graph.output_node().args = (tuple(by_name[value.name] for value in values),)
    for node in reversed(graph.nodes):
        if node.op in ("call_function", "get_attr") and node.name not in kept and not node.users:
            graph.erase_node(node)
    module.recompile()
    arguments = [TensorArgument(name=value.name) for value in values]
    signature = ExportGraphSignature(
        input_specs=list(program.graph_signature.input_specs),
        output_specs=[OutputSpec(OutputKind.USER_OUTPUT, argument, None) for argument in arguments],
    )
    result = tree_structure({value.name: 0 for value in values})
    return rebuilt(program, module, signature, outputs=list(arguments), out_spec=result)


def cut_call(call: Call, source: Source, values: Sequence[torch.fx.Node]) -> Call:
    """Describes the call of a program that was cut: the same inputs, and these values by the names of their nodes."""
    dtypes = [(value.name, value.meta["val"].dtype) for value in values]
    tolerances = output_tolerances(dtypes, {}, cast=parse_floating(source.dtype))
    outputs = tuple(
        TensorOutput(
            name=name,
            dtype=str(dtype).removeprefix("torch."),
            shape=(None,) * value.meta["val"].dim(),
            tolerance=tolerance,
        )
        for value, (name, dtype), tolerance in zip(values, dtypes, tolerances)
    )
    items = tuple(TensorNode(index=index) for index in range(len(outputs)))
    result = MappingNode(keys=tuple(output.name for output in outputs), items=items)
    return msgspec.structs.replace(call, result=result, outputs=outputs)


def _up_to(program: ExportedProgram, point: torch.fx.Node) -> dict[torch.fx.Node, None]:
    """Returns the nodes up to a point in their order, with all parts of their results."""
    computed: dict[torch.fx.Node, None] = {}
    reached = False
    for node in program.graph.nodes:
        if node.op not in ("call_function", "get_attr"):
            continue
        if not reached or (_is_part(node) and node.args[0] in computed):
            computed[node] = None
        reached |= node is point
    return computed


def _is_part(node: torch.fx.Node) -> bool:
    return node.target is operator.getitem


def _returns_tensors(node: torch.fx.Node) -> bool:
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else [value]
    return any(isinstance(each, torch.Tensor) for each in values)
