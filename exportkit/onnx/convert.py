"""Converts a traced program to ONNX."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import onnx_ir
import torch
from onnx_ir.passes.common import InlinePass, RemoveUnusedFunctionsPass, RemoveUnusedOpsetsPass

from exportkit import __version__
from exportkit.errors import ExportError, ExportkitError
from exportkit.export.quiet import quiet_torch
from exportkit.onnx.bodies import traced_body
from exportkit.onnx.calls import CustomCall, with_stand_ins
from exportkit.onnx.decompositions import Decomposition, decomposition_of
from exportkit.onnx.functions import Functions, attributes_of
from exportkit.onnx.lowering import STAND_IN_DOMAIN, translations
from exportkit.onnx.names import cleaned, describe
from exportkit.onnx.refusals import refused_body, refused_model
from exportkit.package.manifest import Call, OnnxFunction, TensorInput, TensorOutput


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
    call: Call,
    *,
    opset: int,
    inline: bool,
    decompositions: Mapping[str, Decomposition],
    progress: Callable[[str], None],
) -> Converted:
    """Converts a program, with a function for each custom operator.

    Args:
        program: The traced program. It does not change.
        call: Its description.
        opset: The version of ONNX's operators.
        inline: Puts the operators of each function where it is called.
        decompositions: The caller's decompositions, by the operator's name.
        progress: Called with a description of each step.

    Raises:
        ExportError: A custom operator has no decomposition, or something in the graph has no counterpart in ONNX.
    """
    _refuse_complex(call)
    with quiet_torch(), with_stand_ins(program) as (changed, calls):
        found = {key: decomposition_of(one.operator, decompositions) for key, one in calls.items()}
        progress("converting the model to ONNX")
        try:
            model = _to_onnx(changed, opset, calls)
        except Exception as error:
            # torch.onnx raises whatever its translations do.
            raise refused_model(error) from error
        lines = cleaned(model)
        functions = Functions(opset)
        for node in [node for node in model.graph.all_nodes() if node.domain == STAND_IN_DOMAIN]:
            one = calls[node.op_type]
            if (function := functions.known(one)) is None:
                progress(f"converting {one.name} to a function")
                function = functions.add(one, _body(node.op_type, one, found[node.op_type], opset, program))
            node.domain, node.op_type = function.domain, function.name
            for attribute in attributes_of(one):
                node.attributes[attribute.name] = attribute
    model.graph.opset_imports.pop(STAND_IN_DOMAIN, None)
    for function in functions.all:
        model.functions[function.identifier()] = function
        model.graph.opset_imports[function.domain] = 1
    if inline:
        InlinePass()(model)
        RemoveUnusedFunctionsPass()(model)
        RemoveUnusedOpsetsPass()(model)
    describe(model, program, call)
    model.producer_name, model.producer_version = "exportkit", __version__
    return Converted(model, () if inline else functions.described, lines)


def _to_onnx(program: torch.export.ExportedProgram, opset: int, calls: Mapping[str, CustomCall]) -> onnx_ir.Model:
    exported = torch.onnx.export(
        program,
        dynamo=True,
        opset_version=opset,
        custom_translation_table=dict(translations(lambda key: len(calls[key].results))),
        verbose=False,
    )
    assert exported is not None
    return exported.model


def _body(
    key: str, call: CustomCall, decomposition: Decomposition, opset: int, program: torch.export.ExportedProgram
) -> onnx_ir.Graph:
    try:
        body = traced_body(call, key, decomposition, program.range_constraints)
        return _to_onnx(body, opset, {key: call}).graph
    except ExportkitError:
        raise
    except Exception as error:
        # A decomposition is the caller's code and may raise anything, and so may torch.onnx.
        raise refused_body(error, call, decomposition) from error


def _refuse_complex(call: Call) -> None:
    tensors: tuple[TensorInput | TensorOutput, ...] = (*call.inputs, *call.outputs)
    for tensor in tensors:
        if tensor.dtype.startswith("complex"):
            raise ExportError(
                f"{tensor.name} is {tensor.dtype}, which ONNX Runtime does not compute with",
                hint="Give and return real tensors, such as torch.view_as_real(x).",
            )
