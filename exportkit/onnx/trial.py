"""Lets another process check a converted model and load it into ONNX Runtime, whose errors may end a process."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import onnx_ir

from exportkit.child.child_client import ChildClient, ChildEndedError
from exportkit.child.messages import Failed
from exportkit.child.process import describe_end
from exportkit.errors import ExportError
from exportkit.onnx.trial_worker import TrialPassed, TryModel
from exportkit.package.atomic import temporary_folder

_WEIGHTS = "weights"  # of a model that is larger than a protobuf may be

# What ONNX Runtime says if it has no kernel, or ONNX does not allow a dtype: the operator, and the node's name.
_REFUSED = (
    re.compile(r"Could not find an implementation for (?P<operator>\w+)\(\d+\) node with name '(?P<node>[^']*)'"),
    re.compile(r"of input parameter \([^)]*\) of operator \((?P<operator>\w+)\) in node \((?P<node>[^)]*)\)"),
    re.compile(r"\(op_type:(?P<operator>\w+), node name: (?P<node>[^)]*)\): .* has unsupported type"),
)


def check_loads(model: onnx_ir.Model, lines: Mapping[str, str]) -> None:
    """Checks a model with onnx.checker and loads it into ONNX Runtime, in a process that may die.

    `lines` are those of the model's code by the names of the nodes they became.

    Raises:
        ExportError: It is not valid ONNX, or ONNX Runtime cannot run it.
        HostError: ONNX Runtime cannot be loaded, or no process can be started.
    """
    with temporary_folder(None, "exportkit-onnx") as folder:
        path = folder / "model.onnx"
        _save(model, path)
        with ChildClient("exportkit.onnx.trial_worker", search_path="installed", with_torch=False) as child:
            try:
                answer = child.ask(TryModel(str(path)), TrialPassed)
            except ChildEndedError as error:
                raise ExportError(
                    f"a process that loads the model into ONNX Runtime {describe_end(error.status)}:\n{child.printed()}"
                ) from error
    if isinstance(answer, Failed):
        if answer.exit_code is not None:
            raise answer.exception()
        raise _refused(answer.message, model, lines)


def _save(model: onnx_ir.Model, path: Path) -> None:
    """Writes a model with its weights in another file. The model in memory keeps its tensors."""
    onnx_ir.save(model, path, external_data=_WEIGHTS, size_threshold_bytes=1 << 20)


def _refused(message: str, model: onnx_ir.Model, lines: Mapping[str, str]) -> ExportError:
    match = next(filter(None, (pattern.search(message) for pattern in _REFUSED)), None)
    if match is None:
        return ExportError(f"the model became ONNX that does not load: {message.strip().splitlines()[0]}")
    operator, name = match["operator"], match["node"]
    found = next(_nodes(model, operator, name), None)
    dtypes = ", ".join(_dtypes(found[1])) if found else ""
    where = f", which comes from {_origin(found[0], found[1], lines)}" if found else ""
    text = f"ONNX Runtime has no CPU kernel for {operator}{' of ' + dtypes if dtypes else ''}{where}"
    return ExportError(text, hint="Cast to float32 there, or export with --dtype float32.")


def _nodes(model: onnx_ir.Model, operator: str, name: str) -> Iterator[tuple[onnx_ir.Function | None, onnx_ir.Node]]:
    """Yields the nodes that ONNX Runtime may mean. It inlines functions, and puts a prefix before nodes' names."""
    everywhere: Iterable[tuple[onnx_ir.Function | None, Iterable[onnx_ir.Node]]] = [
        (None, model.graph.all_nodes()),
        *((function, function.all_nodes()) for function in model.functions.values()),
    ]
    for function, nodes in everywhere:
        for node in nodes:
            if node.op_type == operator and node.name and (name == node.name or name.endswith(f"_{node.name}")):
                yield function, node


def _dtypes(node: onnx_ir.Node) -> list[str]:
    found = (value.dtype for value in node.inputs if value is not None)
    return list(dict.fromkeys(str(dtype).lower() for dtype in found if dtype is not None))


def _origin(function: onnx_ir.Function | None, node: onnx_ir.Node, lines: Mapping[str, str]) -> str:
    if function is not None:
        return f"the decomposition of {function.domain}::{function.name}"
    return lines.get(node.name or "", f"node {node.name}")
