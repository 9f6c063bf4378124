"""Makes ONNX functions of the bodies of custom operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir

from exportkit.onnx.placeholders import CustomCall, Slot
from exportkit.package.manifest import OnnxFunction


class Functions:
    """The functions of a model, with operators of a version of ONNX's: one for each body of an operator."""

    def __init__(self, opset: int) -> None:
        self._opset = opset
        self._by_call: dict[tuple[object, ...], onnx_ir.Function] = {}
        self._by_body: dict[tuple[str, bytes], onnx_ir.Function] = {}

    @property
    def all(self) -> tuple[onnx_ir.Function, ...]:
        """The functions, in the order of their first use."""
        return tuple(self._by_body.values())

    @property
    def described(self) -> tuple[OnnxFunction, ...]:
        """The functions' descriptions for the manifest."""
        return tuple(
            OnnxFunction(operator=operator, domain=f.domain, name=f.name, overload=f.overload)
            for (operator, _), f in self._by_body.items()
        )

    def known(self, call: CustomCall) -> onnx_ir.Function | None:
        """Returns the function of a call with the same dtypes, sizes and arguments, if there was one."""
        return self._by_call.get(_description(call))

    def add(self, call: CustomCall, body: onnx_ir.Graph) -> onnx_ir.Function:
        """Returns the function of a call: a new one, if no other has this body."""
        _without_initializers(body)
        _rename(body, [*call.tensor_names, *call.size_names])
        body.opset_imports.clear()
        body.opset_imports[""] = self._opset
        body.opset_imports.update({node.domain: 1 for node in body.all_nodes() if node.domain})
        attributes = [onnx_ir.Attr(a.name, a.type, None) for a in attributes_of(call)]

        def named(name: str) -> onnx_ir.Function:
            return onnx_ir.Function(call.operator.namespace, name, graph=body, attributes=attributes)

        key = (call.name, onnx_ir.to_proto(named("body")).SerializeToString(deterministic=True))
        if key not in self._by_body:
            self._by_body[key] = named(self._free_name(call))
            for node in self._by_body[key].all_nodes():
                node.name = f"{self._by_body[key].name}.{node.name}"
        self._by_call[_description(call)] = self._by_body[key]
        return self._by_body[key]

    def _free_name(self, call: CustomCall) -> str:
        """Returns the operator's name, with a number after it if another function has it already.

        ONNX's overloads would do, but the reference evaluator takes one overload for another (onnx 1.23).
        """
        taken = {(function.domain, function.name) for function in self.all}
        base = call.name.partition("::")[2].replace(".", "_")
        names = (base, *(f"{base}_{number}" for number in range(2, len(taken) + 3)))
        return next(name for name in names if (call.operator.namespace, name) not in taken)


def _description(call: CustomCall) -> tuple[object, ...]:
    """Returns what a body depends on, and no tensor."""
    tensors = tuple((tensor.dtype, tuple(map(str, tensor.shape))) for tensor in call.tensors)
    return call.name, tensors, tuple(map(str, call.sizes)), repr(call.args), repr(call.kwargs)


def attributes_of(call: CustomCall) -> list[onnx_ir.Attr]:
    """Returns the numbers and texts that a call was given, by the names of the parameters."""
    named = {p.name: value for p, value in zip(call.operator._schema.arguments, call.args)} | dict(call.kwargs)
    return [
        onnx_ir.convenience.convert_attribute(name, plain)
        for name, value in named.items()
        if (plain := _plain(value)) is not None
    ]


def _plain(value: Any) -> Any:
    """Returns an argument as ONNX has attributes; None if it is a tensor, a size or nothing."""
    if isinstance(value, (list, tuple)):
        items = [_plain(item) for item in value]
        return items if items and None not in items else None
    if value is None or isinstance(value, Slot):
        return None
    if isinstance(value, bool):
        return int(value)
    return value if isinstance(value, (int, float, str)) else str(value)


def _without_initializers(graph: onnx_ir.Graph) -> None:
    """Moves a graph's initialisers into Constant nodes, because a function has none."""
    for name, value in list(graph.initializers.items()):
        constant = onnx_ir.node("Constant", [], {"value": value.const_value}, name=f"node_{name}")
        constant.outputs[0].name = f"{name}_value"
        constant.outputs[0].type, constant.outputs[0].shape = value.type, value.shape
        value.replace_all_uses_with(constant.outputs[0], replace_graph_outputs=True)
        first = next(iter(graph), None)
        if first is None:
            graph.append(constant)
        else:
            graph.insert_before(first, constant)
        del graph.initializers[name]


def _rename(graph: onnx_ir.Graph, inputs: Sequence[str]) -> None:
    """Gives the inputs the operator's names, and values and nodes names that say nothing of the model around."""
    taken = set(inputs)
    for name, value in zip(inputs, graph.inputs):
        value.name = name
    for number, node in enumerate(graph.all_nodes()):
        node.name = f"n{number}"
        node.metadata_props.clear()
        node.doc_string = None
        if node.op_type == "Constant" and (tensor := node.attributes.get_tensor("value")) is not None:
            tensor.name = None
        for index, value in enumerate(node.outputs):
            value.name = f"v{number}" if len(node.outputs) == 1 else f"v{number}_{index}"
            while value.name in taken:
                value.name += "_"
            value.shape = None  # that of one call
            value.metadata_props.clear()
    for value in graph.inputs:
        value.shape = None
        value.metadata_props.clear()
    graph.metadata_props.clear()
