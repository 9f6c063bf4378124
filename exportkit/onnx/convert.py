"""Converts a traced program to ONNX, and repairs what onnxscript's optimiser and ONNX Runtime 1.32 get wrong.

tests/onnx/test_corrections.py fails as soon as a repair is not needed.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import onnx_ir
import torch
from onnx_ir.passes.common import InlinePass, RemoveUnusedFunctionsPass, RemoveUnusedOpsetsPass
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, OutputKind, OutputSpec, TensorArgument
from torch.fx import Node
from torch.onnx._internal.exporter._registration import ONNXRegistry
from torch.utils._pytree import tree_structure

from exportkit import __version__
from exportkit.errors import ExportError, ExportkitError
from exportkit.export.models.program_model import rebuilt, taken
from exportkit.export.torch_patches.patched import Function, patched
from exportkit.export.torch_patches.quiet import quiet_torch
from exportkit.onnx.bodies import Decomposition, decomposition_of, traced_body
from exportkit.onnx.branches import refusing_decompositions
from exportkit.onnx.functions import Functions, attributes_of
from exportkit.onnx.interface import Interface
from exportkit.onnx.lowering import PLACEHOLDER_DOMAIN, onnx_dtype, translations
from exportkit.onnx.names import cleaned, describe
from exportkit.onnx.placeholders import CustomCall, with_placeholders
from exportkit.onnx.refusals import refused_body, refused_model
from exportkit.package.manifest import OnnxFunction, PackagedMethod, StateTensor
from exportkit.progress import Progress


@dataclass(frozen=True)
class Converted:
    """A model in ONNX, its functions of custom operators, and by the nodes' names the lines of the model's code."""

    model: onnx_ir.Model
    functions: tuple[OnnxFunction, ...]
    lines: Mapping[str, str]


def convert(
    program: torch.export.ExportedProgram,
    method: PackagedMethod,
    state: Sequence[StateTensor] = (),
    *,
    opset: int,
    inline: bool,
    decompositions: Mapping[str, Decomposition],
    progress: Progress,
) -> Converted:
    """Converts a program, which does not change. Each custom operator becomes a function, or is inlined.

    The caller's decompositions come by the operator's name. ExportError: a custom operator has none, or something in
    the graph has no counterpart in ONNX.
    """
    interface = Interface.of(method, state)
    _refuse_complex(interface)
    conversion = _Conversion(opset, decompositions, progress)
    with quiet_torch(), _one_registry():
        progress("converting the model to ONNX")
        model = conversion.converted(program, lambda error: refused_model(error, program), written_places(method))
    functions, lines = conversion.functions, cleaned(model)
    for function in functions.all:
        model.functions[function.identifier()] = function
        model.graph.opset_imports[function.domain] = 1
    if inline:
        InlinePass()(model)
        RemoveUnusedFunctionsPass()(model)
        RemoveUnusedOpsetsPass()(model)
    describe(model, program, interface, method.call)
    model.producer_name, model.producer_version = "exportkit", __version__
    return Converted(model, () if inline else functions.described, lines)


class _Conversion:
    """Converts the program of a model and those of its decompositions, which may call custom operators too."""

    def __init__(self, opset: int, decompositions: Mapping[str, Decomposition], progress: Progress) -> None:
        self.functions = Functions(opset)
        self._opset = opset
        self._decompositions = decompositions
        self._progress = progress
        self._within: list[str] = []  # the operators whose decompositions are being converted

    def converted(
        self,
        program: torch.export.ExportedProgram,
        refused: Callable[[Exception], ExportError],
        written: Sequence[int] = (),
    ) -> onnx_ir.Model:
        """Converts a program. What it writes, at these places, becomes further results.

        `refused` makes the error to raise of an error of torch.onnx.
        """
        with with_placeholders(program) as (changed, calls):
            found = {key: decomposition_of(call.operator, self._decompositions) for key, call in calls.items()}
            try:
                changed = returning_written(changed, written)
                _forget_constants(changed.graph)
                model = self._translated(changed, calls)
            except ExportkitError:
                raise
            except Exception as error:
                # torch.onnx raises whatever its translations do.
                raise refused(error) from error
            for node in [node for node in model.graph.all_nodes() if node.domain == PLACEHOLDER_DOMAIN]:
                call = calls[node.op_type]
                function = self._function(call, found[node.op_type], program)
                node.domain, node.op_type = function.domain, function.name
                node.attributes.update((a.name, a) for a in attributes_of(call))
        model.graph.opset_imports.pop(PLACEHOLDER_DOMAIN, None)
        restore_initializers(model.graph)
        widen_scatters(model.graph)
        _keep_dtypes(model.graph, changed)
        return model

    def _translated(self, program: torch.export.ExportedProgram, calls: Mapping[str, CustomCall]) -> onnx_ir.Model:
        with refusing_decompositions(program.range_constraints):
            exported = torch.onnx.export(
                program,
                dynamo=True,
                opset_version=self._opset,
                custom_translation_table=dict(translations(calls)),
                verbose=False,
            )
        assert exported is not None
        return exported.model

    def _function(
        self, call: CustomCall, decomposition: Decomposition, program: torch.export.ExportedProgram
    ) -> onnx_ir.Function:
        if (known := self.functions.known(call)) is not None:
            return known
        if call.name in self._within:
            said = f"the decomposition of {call.name} calls {call.name}"
            raise ExportError(said, hint="A decomposition computes the operator with others: torch's, or custom ones.")
        self._progress(f"converting {call.name} to a function")
        self._within.append(call.name)

        def refused(error: Exception) -> ExportError:
            return refused_body(error, call, decomposition)

        try:
            body = traced_body(call, decomposition, program.range_constraints)
        except ExportkitError:
            raise
        except Exception as error:
            # A decomposition is the caller's code and may raise anything.
            raise refused(error) from error
        function = self.functions.add(call, self.converted(body, refused).graph)
        self._within.pop()
        return function


@contextmanager
def _one_registry() -> Iterator[None]:
    """Gives every conversion in the block a copy of one table: making it takes longer than a small function does."""

    def copied(from_torchlib: Function, _: object, **options: Any) -> ONNXRegistry:
        made = _registry(from_torchlib, len(torch._C._dispatch_get_all_op_names()), **options)
        registry = copy.copy(made)
        registry.functions = {operator: list(functions) for operator, functions in registry.functions.items()}
        return registry

    with patched("ONNXRegistry.from_torchlib", copied):
        yield


@functools.lru_cache(maxsize=2)
def _registry(make: Callable[..., ONNXRegistry], operators: int, **options: Any) -> ONNXRegistry:
    """Makes a table. It lacks the operators that come later, such as torchvision's when it is imported."""
    return make(ONNXRegistry, **options)


def _forget_constants(graph: torch.fx.Graph) -> None:
    """Makes None of results that are numbers and texts, in place: torch.onnx passes over None only."""
    output = graph.output_node()
    output.args = (tuple(each if isinstance(each, torch.fx.Node) else None for each in cast(Any, output.args[0])),)


def _keep_dtypes(graph: onnx_ir.Graph, program: torch.export.ExportedProgram) -> None:
    """Casts results to the program's dtypes: torch.onnx promotes some, such as amax of float16, to float32."""
    results = cast(Sequence[object], program.graph.output_node().args[0])
    tensors = [node.meta["val"] for node in results if isinstance(node, torch.fx.Node)]
    for number, (output, tensor) in enumerate(zip(graph.outputs, tensors)):
        if output.dtype != onnx_dtype(tensor):
            node = onnx_ir.node("Cast", [output], {"to": onnx_dtype(tensor)}, name=f"result_{number}")
            node.outputs[0].name = f"result_{number}"
            node.outputs[0].dtype, node.outputs[0].shape = onnx_dtype(tensor), output.shape
            graph.append(node)
            graph.outputs[number] = node.outputs[0]


def _refuse_complex(interface: Interface) -> None:
    for _, tensor in (*interface.inputs, *interface.outputs):
        if tensor.dtype.startswith("complex"):
            said = f"{tensor.name} is {tensor.dtype}, which ONNX Runtime does not compute with"
            raise ExportError(said, hint="Give and return real tensors, such as torch.view_as_real(x).")


# --- what a program writes: an ONNX model writes into nothing ---------------------------------------------------------


def written_places(method: PackagedMethod) -> list[int]:
    """Returns the places of the tensors that a method's program writes, among those that it takes."""
    inputs = [place for place, each in enumerate(method.call.inputs) if each.written is not None]
    state = [len(method.call.inputs) + place for place, use in enumerate(method.state) if use.written]
    return inputs + state


def returning_written(program: ExportedProgram, places: Sequence[int]) -> ExportedProgram:
    """Returns a program that writes into nothing. After its results, it returns the tensors that the given one writes.

    `places` has their places among those that it takes. The given program does not change.
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
    signature = ExportGraphSignature(list(signature.input_specs), specs)
    outputs, result = [spec.arg for spec in specs], tree_structure(tuple(specs))
    return rebuilt(functional, functional.graph_module, signature, outputs=outputs, out_spec=result)


# --- repairs ----------------------------------------------------------------------------------------------------------


_SCATTERS = ("ScatterElements", "ScatterND")
_HALVES = (onnx_ir.DataType.FLOAT16, onnx_ir.DataType.BFLOAT16)
_WIDE = onnx_ir.DataType.FLOAT


def restore_initializers(graph: onnx_ir.Graph) -> None:
    """Registers constants that nodes take, and that another of the same name replaced, under names of their own.

    onnxscript's optimiser gives the constants of fused Clips of one tensor the same names:
    https://github.com/microsoft/onnxscript/issues/2945.
    """
    for node in list(graph.all_nodes()):
        for value in node.inputs:
            if value is None or value.producer() is not None or value.const_value is None or value.is_graph_input():
                continue
            if graph.initializers.get(value.name or "") is not value:
                value.name = next(
                    name for number in itertools.count() if (name := f"constant_{number}") not in graph.initializers
                )
                value.const_value.name = value.name
                graph.register_initializer(value)


def widen_scatters(graph: onnx_ir.Graph) -> None:
    """Computes the sums and products of scattered float16 and bfloat16 in float32.

    ONNX Runtime loads such a model, and fails when it is called: https://github.com/microsoft/onnxruntime/issues/17653.
    """
    for node in list(graph.all_nodes()):
        combines = node.attributes.get_string("reduction", "none") != "none"
        if node.domain == "" and node.op_type in _SCATTERS and combines:
            data, index, updates = node.inputs
            if data is not None and updates is not None and data.dtype in _HALVES:
                _upcast(node, data, index, updates)


def _upcast(node: onnx_ir.Node, data: onnx_ir.Value, index: onnx_ir.Value | None, updates: onnx_ir.Value) -> None:
    assert node.graph is not None
    wide = [_cast(node, value, _WIDE) for value in (data, updates)]
    scatter = onnx_ir.node(
        node.op_type, [wide[0].outputs[0], index, wide[1].outputs[0]], dict(node.attributes), name=f"{node.name}_wide"
    )
    old = node.outputs[0]
    scatter.outputs[0].dtype, scatter.outputs[0].shape = _WIDE, old.shape
    narrow = _cast(node, scatter.outputs[0], data.dtype)
    narrow.outputs[0].shape = old.shape
    node.graph.insert_before(node, [*wide, scatter, narrow])
    onnx_ir.convenience.replace_all_uses_with(old, narrow.outputs[0], replace_graph_outputs=True)
    narrow.outputs[0].name = old.name
    node.graph.remove(node)


def _cast(node: onnx_ir.Node, value: onnx_ir.Value, dtype: onnx_ir.DataType | None) -> onnx_ir.Node:
    assert dtype is not None
    cast = onnx_ir.node("Cast", [value], {"to": dtype}, name=f"{node.name}_{value.name}_to_{dtype.name.lower()}")
    cast.outputs[0].dtype, cast.outputs[0].shape = dtype, value.shape
    return cast
