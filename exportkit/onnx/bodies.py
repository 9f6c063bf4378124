"""Finds the decomposition of a custom operator, and traces it to the program of an ONNX function's body."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
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
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_structure

from exportkit.errors import ExportError
from exportkit.export.trace.preflight import qualified_name
from exportkit.installed import described_operators
from exportkit.onnx.branches import Ranges, refusing_branches
from exportkit.onnx.placeholders import CustomCall

Decomposition = Callable[..., Any]


def decomposition_of(operator: OpOverload, given: Mapping[str, Decomposition]) -> Decomposition:
    """Returns the decomposition of an operator: the caller's, by its name, or else that of an installed package.

    ExportError: it has none.
    """
    name = qualified_name(operator)
    if name in given:
        return given[name]
    if (described := described_operators([name]).get(name)) is not None:
        return described.decomposition or described.reference
    if torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "CompositeImplicitAutograd"):
        return operator.decompose
    raise ExportError(
        f"operator {name} has no decomposition, so ONNX cannot compute it",
        hint=f"Give a function with its parameters that computes the same with torch's operators: "
        f"--decomposition {name}=package.module:function, or ExportSpec(decompositions={{{name!r}: function}}).",
    )


def traced_body(call: CustomCall, decomposition: Decomposition, ranges: Ranges) -> ExportedProgram:
    """Traces the decomposition of a call with the fake tensors and symbolic sizes of the graph it stands in.

    So what holds between the sizes of the arguments there, such as N = h * w, holds in the body as well.
    torch.export.export would give the arguments new sizes, and it takes no size that is computed. ExportError: it
    branches on a size, or returns something else than the operator.
    """

    def run(*arguments: object) -> list[torch.Tensor]:
        tensors, sizes = arguments[: len(call.tensors)], arguments[len(call.tensors) :]
        return call.run(decomposition, tensors, sizes)  # type: ignore[arg-type]  # as `_traced` gives them

    with refusing_branches(call.name, ranges):
        # Above autograd, torch.export's place, a composite operator would be traced as itself.
        module = _traced(run, call, pre_dispatch=decomposition != call.operator.decompose)
    constants = _lifted_constants(module)
    graph = module.graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    results = cast(list[Node], graph.output_node().args[0])
    inputs = [_argument(node) for node in placeholders[len(constants) :]]
    in_spec = tree_structure((tuple(range(len(inputs))), {}))
    signature = ModuleCallSignature([], [], in_spec, tree_structure(tuple(range(len(results)))))
    return ExportedProgram(
        root=module,
        graph=graph,
        graph_signature=ExportGraphSignature(
            [
                *(InputSpec(InputKind.CONSTANT_TENSOR, TensorArgument(name=name), name) for name in constants),
                *(InputSpec(InputKind.USER_INPUT, argument, None) for argument in inputs),
            ],
            [OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(name=node.name), None) for node in results],
        ),
        state_dict={},
        range_constraints=dict(ranges),
        module_call_graph=[ModuleCallEntry("", signature)],
        constants={**constants},
        verifiers=[torch._export.verifier.TrainingIRVerifier],
    )


def _traced(function: Callable[..., list[torch.Tensor]], call: CustomCall, *, pre_dispatch: bool) -> GraphModule:
    mode = call.fake_mode
    if mode.shape_env is not None:
        # Tracing the program again left sizes that depend on data there, and torch would look for them in this graph.
        mode.shape_env.pending_fresh_unbacked_symbols.clear()
    with mode, enable_python_dispatcher(), torch.no_grad():
        return make_fx(function, tracing_mode="real", pre_dispatch=pre_dispatch)(*call.tensors, *call.sizes)


def _argument(node: Node) -> TensorArgument | SymIntArgument:
    kind = TensorArgument if isinstance(node.meta["val"], torch.Tensor) else SymIntArgument
    return kind(name=node.name)


def _lifted_constants(module: GraphModule) -> dict[str, torch.Tensor]:
    """Makes inputs of the tensors that the traced code made of numbers, as ExportedPrograms have them."""
    constants: dict[str, torch.Tensor] = {}
    nodes: dict[str, Node] = {}
    for node in [node for node in module.graph.nodes if node.op == "get_attr"]:
        name = str(node.target)
        value = getattr(module, name)
        if not isinstance(value, torch.Tensor):
            continue  # a branch of torch.cond
        if name not in nodes:
            with module.graph.inserting_before(next(iter(module.graph.nodes))):
                nodes[name] = module.graph.placeholder(f"c{name}")
            nodes[name].meta["val"] = node.meta["val"]
            constants[nodes[name].name] = value
        node.replace_all_uses_with(nodes[name])
        module.graph.erase_node(node)
    module.recompile()
    return dict(reversed(constants.items()))
