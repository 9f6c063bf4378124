"""The calls of custom operators that a package's compiled code makes through torch's dispatcher.

AOTInductor writes them beside the code, as JSON of the same form as a program's nodes. What it fused around them is
machine code, so they are a list and no graph.
"""

from __future__ import annotations

from typing import Any

import msgspec

from exportkit.package.archive import PackageReader
from exportkit.package.exported_graph import Node
from exportkit.report.argument_text import argument_text
from exportkit.report.untrusted import first

_FORM = (KeyError, TypeError, AttributeError, ValueError)  # what arguments of another form raise
_MOST_CALLS = 500
_MAX_BYTES = 64 << 20


class _Call(msgspec.Struct, frozen=True):
    node: Node


class _Calls(msgspec.Struct, frozen=True):
    nodes: list[_Call]


# Made at import: exportkit.package.manifest says why.
_DECODER = msgspec.json.Decoder(_Calls)


def compiled_calls(reader: PackageReader, left_out: list[str]) -> list[list[Any]]:
    """Returns the target, the operator, and the arguments of each call, in order. Files of other forms have none."""
    calls: list[list[Any]] = []
    for target in reader.manifest.targets:
        folder = f"data/aotinductor/{target.name}/"
        for record in reader.manifest.records:
            if record.name.startswith(folder) and record.name.endswith(".wrapper.json") and record.size <= _MAX_BYTES:
                calls += [[target.name, *_described(call.node)] for call in _decoded(reader.read(record.name))]
    return list(first(calls, _MOST_CALLS, "calls of operators by compiled code", left_out))


def _decoded(content: bytes) -> list[_Call]:
    try:
        return _DECODER.decode(content).nodes
    except (msgspec.DecodeError, RecursionError):
        return []


def _described(node: Node) -> list[str]:
    try:
        arguments = [f"{each.name}={argument_text(each.arg)}" for each in node.inputs]
    except _FORM:
        arguments = ["?"]
    return [node.target, ", ".join(arguments)]
