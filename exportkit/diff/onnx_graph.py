"""Reads the graph of an ONNX model, without running it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exportkit.diff.graph import GraphMeaning, NodeMeaning, UnreadableGraphError
from exportkit.diff.stored_tensors import StoredTensor, contiguous, held, in_file
from exportkit.errors import OnnxFileError
from exportkit.onnx.files import open_data, read_model
from exportkit.onnx.onnx_session import ONNX_TYPES
from exportkit.package.manifest import Onnx

if TYPE_CHECKING:
    import onnx

_DTYPES = {number: dtype for dtype, number in ONNX_TYPES.items()}


def read_onnx(model: Path, described: Onnx, stack: ExitStack) -> GraphMeaning:
    """Reads a model whose digests the sidecar has.

    Args:
        model: The `.onnx`.
        described: What the sidecar says of it.
        stack: Keeps the file of the weights open, from which tensors are read later.

    Raises:
        UnreadableGraphError: The package `onnx` is not installed, or it cannot read the model.
        OnnxFileError: A file was changed since the sidecar was checked.
    """
    try:
        import onnx
    except ImportError as error:
        raise UnreadableGraphError(f"the package onnx cannot be imported: {error}") from error
    content = read_model(model, described)
    data = stack.enter_context(open_data(model, described))
    try:
        return _graph(onnx.load_model_from_string(content), None if data is None else data.fileno())
    except OnnxFileError:
        raise
    except Exception as error:  # the errors of protobuf and of onnx have no common base
        raise UnreadableGraphError(f"{type(error).__name__}: {error}") from error


def _graph(model: onnx.ModelProto, data: int | None) -> GraphMeaning:
    graph, names = model.graph, dict[str, str]()
    initializers = {tensor.name: _tensor(tensor, data) for tensor in graph.initializer}
    names |= {name: f"weight {name}" for name in initializers}
    names |= {value.name: f"input {index}" for index, value in enumerate(graph.input)}
    nodes = [*_nodes(graph.node, names, "")]
    for function in sorted(model.functions, key=lambda each: (each.domain, each.name, each.overload)):
        inside = {name: f"input {index}" for index, name in enumerate(function.input)}
        where = f"function {function.domain}::{function.name}" + (f":{function.overload}" if function.overload else "")
        nodes += _nodes(function.node, inside, where)
    interface = [
        *sorted(f"{opset.domain} {opset.version}" for opset in model.opset_import),
        *(_digest(value.type) for value in (*graph.input, *graph.output)),
        *(names.get(value.name, value.name) for value in graph.output),
    ]
    return GraphMeaning(tuple(nodes), "\n".join(interface), initializers)


def _nodes(nodes: Iterable[Any], names: dict[str, str], where: str) -> Iterator[NodeMeaning]:
    for index, node in enumerate(nodes):
        operator = f"{node.domain or 'onnx'}::{node.op_type}" + (f":{node.overload}" if node.overload else "")
        inputs = [names.get(name, name) for name in node.input]
        attributes = sorted(_attribute(attribute, names) for attribute in node.attribute)
        names |= {name: f"{where} node {index}.{number}" for number, name in enumerate(node.output)}
        meaning = repr((operator, inputs, attributes, len(node.output)))
        yield NodeMeaning(operator, node.name or f"node {index}", where, meaning)


def _attribute(attribute: Any, names: dict[str, str]) -> str:
    graphs = [attribute.g] if attribute.HasField("g") else list(attribute.graphs)
    if not graphs:
        return f"{attribute.name} {attribute.ref_attr_name} {_digest(attribute)}"
    found = []
    for graph in graphs:
        inside = names | {value.name: f"inner input {index}" for index, value in enumerate(graph.input)}
        inside |= {tensor.name: f"inner weight {_digest(tensor)}" for tensor in graph.initializer}
        found += [node.meaning for node in _nodes(graph.node, inside, "inner")]
        found += [inside.get(value.name, value.name) for value in graph.output]
    return f"{attribute.name} {found}"


def _digest(message: Any) -> str:
    """Returns a digest of a message without what only describes it."""
    copy = type(message)()
    copy.CopyFrom(message)
    if any(field.name == "doc_string" for field in copy.DESCRIPTOR.fields):
        copy.ClearField("doc_string")
    return hashlib.sha256(copy.SerializeToString(deterministic=True)).hexdigest()[:16]


def _tensor(tensor: Any, data: int | None) -> StoredTensor:
    from onnx import TensorProto, numpy_helper

    dtype, shape = _DTYPES.get(tensor.data_type, f"ONNX type {tensor.data_type}"), tuple(tensor.dims)
    if tensor.data_location == TensorProto.EXTERNAL:
        place = {entry.key: entry.value for entry in tensor.external_data}
        if data is None:
            raise ValueError(f"{tensor.name} is in a file that the sidecar does not list")
        size, offset = int(place["length"]), int(place.get("offset", "0"))
        if size < 0 or offset < 0:
            raise ValueError(f"{tensor.name} is at {offset} and has {size} bytes")
        return StoredTensor(dtype, shape, contiguous(shape), size, in_file(data, offset))
    content = tensor.raw_data if tensor.HasField("raw_data") else numpy_helper.to_array(tensor).tobytes()
    return StoredTensor(dtype, shape, contiguous(shape), len(content), held(content))
