"""Traces the decomposition of a custom operator to the body of an ONNX function."""

from __future__ import annotations

import operator

import torch
from torch.export.exported_program import ExportedProgram, ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    SymIntArgument,
    TensorArgument,
)
from torch.utils._pytree import tree_structure

from exportkit.onnx.branches import Ranges, refusing_branches
from exportkit.onnx.calls import STAND_IN, CustomCall, Sizes, Tensors
from exportkit.onnx.decompositions import Decomposition


def traced_body(call: CustomCall, key: str, decomposition: Decomposition, ranges: Ranges) -> ExportedProgram:
    """Traces the decomposition of a call with the sizes of the graph it stands in.

    Tracing starts from a program that only has the call: so sizes stay symbolic, and what holds between the sizes of
    the arguments in the graph, such as N = h * w, holds in the body.

    Raises:
        ExportError: The decomposition branches on a size.
    """

    def decomposed(tensors: Tensors, sizes: Sizes, key: str) -> list[torch.Tensor]:
        return call.run(decomposition, tensors, sizes)

    with refusing_branches(call.name, ranges):
        return _program_of_call(call, key, ranges).run_decompositions({STAND_IN: decomposed})


def _program_of_call(call: CustomCall, key: str, ranges: Ranges) -> ExportedProgram:
    graph = torch.fx.Graph()

    def placeholder(name: str, value: object) -> torch.fx.Node:
        node = graph.placeholder(name)
        node.meta["val"] = value
        return node

    tensors = [placeholder(f"tensor_{i}", value) for i, value in enumerate(call.tensors)]
    sizes = [placeholder(f"size_{i}", value) for i, value in enumerate(call.sizes)]
    stand_in = graph.call_function(STAND_IN, (tensors, sizes, key))
    stand_in.meta["val"] = list(call.results)
    results = []
    for i, value in enumerate(call.results):
        results.append(graph.call_function(operator.getitem, (stand_in, i)))
        results[-1].meta["val"] = value
    graph.output(tuple(results))
    inputs = [TensorArgument(name=node.name) for node in tensors] + [SymIntArgument(name=n.name) for n in sizes]
    in_spec = tree_structure((tuple(range(len(inputs))), {}))
    signature = ModuleCallSignature([], [], in_spec, tree_structure(tuple(range(len(results)))))
    return ExportedProgram(
        root=torch.fx.GraphModule(torch.nn.Module(), graph),
        graph=graph,
        graph_signature=ExportGraphSignature(
            [InputSpec(InputKind.USER_INPUT, argument, None) for argument in inputs],
            [OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(name=node.name), None) for node in results],
        ),
        state_dict={},
        range_constraints=dict(ranges),
        module_call_graph=[ModuleCallEntry("", signature)],
        constants={},
        verifiers=[torch._export.verifier.TrainingIRVerifier],
    )
