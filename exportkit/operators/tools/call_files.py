"""Calls and answers on their way between two processes: tensors in safetensors files, the rest as JSON.

The process of a kernel that nobody trusts yet writes such files. Reading them runs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from exportkit.errors import UsageError
from exportkit.operators.contract.sample import Sample

Document = dict[str, Any]

_KINDS: Mapping[type, str] = {
    torch.dtype: "dtype",
    torch.layout: "layout",
    torch.memory_format: "memory_format",
    torch.device: "device",
    complex: "complex",
}
_READERS: Mapping[str, Callable[[str], Any]] = {"device": torch.device, "complex": complex}


def write_calls(path: Path, calls: Sequence[Sample]) -> tuple[Document, ...]:
    """Writes the tensors of calls to a file. Returns the calls, with the tensors' names."""
    tensors: dict[str, Tensor] = {}

    def document(value: Any) -> Any:
        if isinstance(value, Tensor):
            name = str(len(tensors))
            tensors[name] = value.detach().cpu().contiguous().clone()
            return {"tensor": name, "device": str(value.device)}
        if isinstance(value, (list, tuple)):
            return [document(each) for each in value]
        if kind := _KINDS.get(type(value)):
            return {kind: str(value).removeprefix("torch.")}
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        said = f"a call has an argument of type {type(value).__name__}, which no other process can be sent"
        raise UsageError(said, hint="Give tensors, numbers, strings, dtypes, devices, and lists of these.")

    documents = tuple(
        {"label": call.label, "args": document(call.args), "kwargs": {n: document(v) for n, v in call.kwargs.items()}}
        for call in calls
    )
    save_file(tensors, path)
    return documents


def read_calls(path: Path, documents: Sequence[Document]) -> list[Sample]:
    """Reads what `write_calls` wrote."""
    tensors = load_file(path)

    def value(document: Any) -> Any:
        if isinstance(document, list):
            return [value(each) for each in document]
        if not isinstance(document, dict):
            return document
        if "tensor" in document:
            return tensors[document["tensor"]].to(document["device"])
        ((kind, text),) = document.items()
        return _READERS[kind](text) if kind in _READERS else getattr(torch, text)

    return [
        Sample(each["label"], tuple(value(each["args"])), {n: value(v) for n, v in each["kwargs"].items()})
        for each in documents
    ]


def write_answers(path: Path, answers: Mapping[int, Sequence[Tensor]]) -> None:
    """Writes what calls answered, by the call's number."""
    named = {f"{call}.{output}": tensor for call, found in answers.items() for output, tensor in enumerate(found)}
    save_file({name: tensor.detach().cpu().contiguous().clone() for name, tensor in named.items()}, path)


def read_answers(path: Path) -> dict[int, list[Tensor]]:
    """Reads what `write_answers` wrote."""
    found: dict[int, dict[int, Tensor]] = {}
    for name, tensor in load_file(path).items():
        call, _, output = name.partition(".")
        found.setdefault(int(call), {})[int(output)] = tensor
    return {call: [outputs[number] for number in sorted(outputs)] for call, outputs in found.items()}
