"""Converts a traced program to ONNX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import onnx_ir
import torch
from torch._ops import OpOverload

from exportkit.export.quiet import quiet_torch
from exportkit.onnx.bodies import traced_body
from exportkit.onnx.calls import CustomCall, with_stand_ins
from exportkit.onnx.decompositions import Decomposition, decomposition_of
from exportkit.onnx.functions import Body, Functions, attributes_of
from exportkit.onnx.lowering import STAND_IN_DOMAIN, translations


def convert(
    program: torch.export.ExportedProgram, opset: int, decompositions: Mapping[str, Decomposition]
) -> onnx_ir.Model:
    """Converts a program, with a function for each custom operator."""
    with quiet_torch(), with_stand_ins(program, lambda operator: False) as (changed, calls):
        found = {key: decomposition_of(call.operator, decompositions) for key, call in calls.items()}
        model = _to_onnx(changed, opset, calls)
        functions = Functions(opset)
        for node in list(model.graph.all_nodes()):
            if node.domain == STAND_IN_DOMAIN:
                key = node.op_type
                body = _to_onnx(traced_body(calls[key], key, found[key], program.range_constraints), opset, calls)
                function = functions.of(Body(calls[key], body.graph))
                node.domain, node.op_type = function.domain, function.name
                for attribute in attributes_of(calls[key]):
                    node.attributes[attribute.name] = attribute
    for function in functions.all:
        model.functions[function.identifier()] = function
        model.graph.opset_imports[function.domain] = 1
    model.graph.opset_imports.pop(STAND_IN_DOMAIN, None)
    return model


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
