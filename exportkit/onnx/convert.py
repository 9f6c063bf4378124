"""Converts a traced program to ONNX."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import onnx_ir
import torch
from onnx_ir.passes.common import InlinePass, RemoveUnusedFunctionsPass, RemoveUnusedOpsetsPass
from torch.onnx._internal.exporter._registration import ONNXRegistry

from exportkit import __version__
from exportkit.errors import ExportError, ExportkitError
from exportkit.export.torch_patches.patched import Function, patched
from exportkit.export.torch_patches.quiet import quiet_torch
from exportkit.onnx.bodies import traced_body
from exportkit.onnx.branches import refusing_decompositions
from exportkit.onnx.decompositions import Decomposition, decomposition_of
from exportkit.onnx.functions import Functions, attributes_of
from exportkit.onnx.interface import Interface
from exportkit.onnx.lowering import PLACEHOLDER_DOMAIN, onnx_dtype, translations
from exportkit.onnx.names import cleaned, describe
from exportkit.onnx.placeholders import CustomCall, with_placeholders
from exportkit.onnx.refusals import refused_body, refused_model
from exportkit.onnx.repairs import restore_initializers, widen_scatters
from exportkit.onnx.written import returning_written, written_places
from exportkit.package.manifest import OnnxFunction, PackagedMethod, StateTensor
from exportkit.progress import Progress


@dataclass(frozen=True)
class Converted:
    """A model in ONNX.

    Attributes:
        model: The model.
        functions: The functions of its custom operators.
        lines: The line of the model's code that a node comes from, by the node's name.
    """

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
    """Converts a program, with a function for each custom operator.

    Args:
        program: The traced program. It does not change.
        method: Its description.
        state: The whole model's state.
        opset: The version of ONNX's operators.
        inline: Puts the operators of each function where it is called.
        decompositions: The caller's decompositions, by the operator's name.
        progress: Called with a description of each step.

    Raises:
        ExportError: A custom operator has no decomposition, or something in the graph has no counterpart in ONNX.
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
        """Converts a program.

        Args:
            program: The program.
            refused: Makes the error to raise of an error of torch.onnx.
            written: The places of the tensors that it writes. They become further results.
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
            raise ExportError(
                f"the decomposition of {call.name} calls {call.name}",
                hint="A decomposition computes the operator with others: torch's, or custom ones.",
            )
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
            raise ExportError(
                f"{tensor.name} is {tensor.dtype}, which ONNX Runtime does not compute with",
                hint="Give and return real tensors, such as torch.view_as_real(x).",
            )
