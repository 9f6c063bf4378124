"""Programs and packages written by hand: what a reader of programs must cope with."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from exportkit.package.archive import write_package
from tests.package import samples
from tests.runtime import tiny

FLOAT32 = 7


def argument(value: Any) -> dict[str, Any]:
    return {"as_tensor": {"name": value}} if isinstance(value, str) else value


def node(name: str, *inputs: Any, target: str = "torch.ops.aten.relu.default", **metadata: str) -> dict[str, Any]:
    """A node with one result, whose inputs are names of values or whole arguments."""
    named = [{"name": f"a{number}", "arg": argument(each), "kind": 1} for number, each in enumerate(inputs)]
    return {"target": target, "inputs": named, "outputs": [argument(name)], "metadata": metadata, "name": name}


def document(nodes: Sequence[Mapping[str, Any]], outputs: Sequence[str] = (), **changes: Any) -> dict[str, Any]:
    """A program of one input `x`, in the form that torch writes."""
    names = ["x", *(each["name"] for each in nodes)]
    meta = {"dtype": FLOAT32, "sizes": [{"as_int": 4}], "requires_grad": False}
    graph = {
        "inputs": [argument("x")],
        "outputs": [argument(name) for name in outputs],
        "nodes": list(nodes),
        "tensor_values": dict.fromkeys(names, meta),
        "sym_int_values": {},
    }
    signature = {
        "input_specs": [{"user_input": {"arg": argument("x")}}],
        "output_specs": [{"user_output": {"arg": argument(name)}} for name in outputs],
    }
    made = {
        "graph_module": {"graph": graph, "signature": signature},
        "schema_version": {"major": 8, "minor": 20},
        "torch_version": "2.13.0",
    }
    return {**made, **changes}


def program(content: Mapping[str, Any] | bytes, name: str = "archive/models/model.json", **archive: Any) -> bytes:
    """The archive of a program."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", **archive) as written:
        written.writestr(name, content if isinstance(content, bytes) else json.dumps(content))
    return file.getvalue()


def package(path: Path, content: bytes) -> Path:
    """A package with a program, of one input and one output."""
    call = tiny.tensors_call({"x": ("float32", (4,))}, ("float32", (4,)))
    write_package(path, samples.program_manifest(methods=tiny.forward(call), cases=()), {samples.PROGRAM: content})
    return path
