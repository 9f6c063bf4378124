"""Lets a program return what it writes: an ONNX model writes into nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, OutputKind, OutputSpec, TensorArgument
from torch.fx import Node
from torch.utils._pytree import tree_structure

from exportkit.export.models.program_model import taken
from exportkit.package.manifest import PackagedMethod


def written_places(method: PackagedMethod) -> list[int]:
    """Returns the places of the tensors that a method's program writes, among those that it takes."""
    inputs = [place for place, each in enumerate(method.call.inputs) if each.written is not None]
    state = [len(method.call.inputs) + place for place, use in enumerate(method.state) if use.written]
    return inputs + state


def returning_written(program: ExportedProgram, places: Sequence[int]) -> ExportedProgram:
    """Returns a program that writes into nothing. After its results, it returns the tensors that the given one writes.

    Args:
        program: The program. It does not change.
        places: The places of the tensors that it writes, among those that it takes.
    """
    if not places:
        return program
    functional = program.run_decompositions({})
    graph, signature = functional.graph, functional.graph_signature
    names, inputs = taken(functional), {node.name: node for node in graph.nodes if node.op == "placeholder"}
    output = graph.output_node()
    returned = list(zip(signature.output_specs, cast(Sequence[Any], output.args[0])))
    new = {spec.target: node for spec, node in returned if spec.kind is OutputKind.USER_INPUT_MUTATION}
    kept = [(spec, node) for spec, node in returned if spec.kind is OutputKind.USER_OUTPUT]
    for place in places:
        name = names[place]
        value = cast(Node, new.get(name, inputs[name]))
        with graph.inserting_before(output):
            # A copy, because ONNX allows a value as an output once, and not where it is an input.
            copy = graph.call_function(torch.ops.aten.clone.default, (value,))
        copy.meta = {"val": value.meta["val"]}
        kept.append((OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(copy.name), None), copy))
    output.args = (tuple(node for _, node in kept),)
    functional.graph_module.recompile()
    specs = [spec for spec, _ in kept]
    whole = functional.module_call_graph[0]
    assert whole.signature is not None
    called = dataclasses.replace(
        whole.signature, outputs=[spec.arg for spec in specs], out_spec=tree_structure(tuple(specs))
    )
    return ExportedProgram(
        functional.graph_module,
        graph,
        ExportGraphSignature(list(signature.input_specs), specs),
        functional.state_dict,
        functional.range_constraints,
        [dataclasses.replace(whole, signature=called), *functional.module_call_graph[1:]],
        functional.example_inputs,
        functional.constants,
        verifiers=functional.verifiers,
    )
