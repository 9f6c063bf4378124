"""Converts modules in this process, without cases and files, and runs what they become."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir
import onnxruntime
import torch
from onnx import helper
from torch.utils._pytree import tree_leaves

from exportkit import ExportSpec
from exportkit.export.export_options import TraceOptions
from exportkit.export.models.resolved import EagerModel
from exportkit.export.trace.describe_program import describe_output, describe_program
from exportkit.export.trace.trace import ready_to_trace
from exportkit.export.trace.trace_method import trace_with_torch_export
from exportkit.onnx.convert import Converted, convert
from exportkit.package.manifest import PackagedMethod

BFLOAT16 = onnx.TensorProto.BFLOAT16


def convert_spec(spec: ExportSpec, *, opset: int = 20, inline: bool = False) -> Converted:
    with ready_to_trace(EagerModel(spec=spec), TraceOptions(), torch.device("cpu")) as (_, tasks):
        task, sizes = tasks["forward"]
        program, *_ = trace_with_torch_export(task, sizes)
        with torch.no_grad():
            output = describe_output(spec.model(*spec.example_inputs, **spec.example_kwargs))
        call, _ = describe_program(program, task.bound, sizes, output, spec)
        method = PackagedMethod(name="forward", call=call, state=())
        return convert(
            program, method, opset=opset, inline=inline, decompositions=spec.decompositions, progress=lambda step: None
        )


def checked(converted: Converted) -> onnx.ModelProto:
    """The model, which passes ONNX's full check."""
    proto = onnx_ir.to_proto(converted.model)
    onnx.checker.check_model(proto, full_check=True)
    return proto


def tensors_of(result: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def session_of(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run(session: onnxruntime.InferenceSession, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """ONNX Runtime's answers, by position."""
    names = [value.name for value in session.get_inputs()]
    values = {name: _value(tensor) for name, tensor in zip(names, inputs, strict=True)}
    return [_tensor(value) for value in session.run_with_ort_values(None, values)]


def run_reference(model: onnx.ModelProto, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The answers of ONNX's own evaluator, which knows neither torch nor ONNX Runtime."""
    from onnx.reference import ReferenceEvaluator

    names = [value.name for value in model.graph.input]
    given = {name: tensor.numpy() for name, tensor in zip(names, inputs, strict=True)}
    return [_from_numpy(answer) for answer in ReferenceEvaluator(model).run(None, given)]


def model_of_function(model: onnx.ModelProto, name: str, inputs: Mapping[str, torch.Tensor]) -> onnx.ModelProto:
    """A model that only calls one function of a model."""
    (call,) = (node for node in model.graph.node if node.op_type == name and node.domain)
    function = next(f for f in model.functions if f.name == name)
    node = helper.make_node(name, list(function.input), list(function.output), domain=function.domain)
    node.attribute.extend(call.attribute)
    values = [
        helper.make_tensor_value_info(name, _onnx_dtype(tensor), [None] * tensor.ndim)
        for name, tensor in inputs.items()
    ]
    outputs = [onnx.ValueInfoProto(name=name) for name in function.output]
    graph = helper.make_graph([node], name, values, outputs)
    return helper.make_model(graph, functions=[function], opset_imports=model.opset_import, ir_version=model.ir_version)


def _onnx_dtype(tensor: torch.Tensor) -> int:
    return int(onnx_ir.tensor_adapters.from_torch_dtype(tensor.dtype))


def _value(tensor: torch.Tensor) -> onnxruntime.OrtValue:
    tensor = tensor.contiguous()
    if tensor.dtype == torch.bfloat16:  # NumPy has no such type
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(tensor.view(torch.uint16).numpy(), BFLOAT16)
    return onnxruntime.OrtValue.ortvalue_from_numpy(tensor.numpy())


def _from_numpy(answer: np.ndarray) -> torch.Tensor:
    if answer.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(answer.view(np.uint16).copy()).view(torch.bfloat16)
    return torch.as_tensor(answer.copy())


def _tensor(value: onnxruntime.OrtValue) -> torch.Tensor:
    if value.element_type() == BFLOAT16:
        return torch.utils.dlpack.from_dlpack(value._ortvalue.to_dlpack()).clone()
    return torch.from_numpy(value.numpy().copy())
