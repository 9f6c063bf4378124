"""What the page says about an artifact, as plain values. Texts that `inspect` prints too are made by the caller."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import msgspec

from exportkit.package.archive import PackageReader
from exportkit.package.consistency import AOTINDUCTOR_DIR
from exportkit.package.dtypes import ITEM_BYTES
from exportkit.package.exported_graph import Node
from exportkit.package.manifest import MANIFEST_NAME, Manifest, Weight, code_folder
from exportkit.package.trust import signature_info
from exportkit.report.argument_text import argument_text
from exportkit.report.untrusted import LeftOut

# The kinds of records, by the beginnings of their names. The rest is small: what torch's reader looks for.
_KINDS = {
    "data/aotinductor/": "compiled code",
    "data/weights/": "weights",
    "exportkit/ops/": "operator libraries",
    "exportkit/cases/": "cases",
    "exportkit/program": "program",
    "exportkit/state/": "state",
}
_MAX_CALLS_BYTES = 64 << 20

Rows = Sequence[Sequence[str]]


@dataclass(frozen=True)
class MethodWords:
    """How a method is called.

    Attributes:
        name: The method's name.
        inputs: Name, and dtype and shape.
        outputs: Name, dtype and shape, and what it is held to.
    """

    name: str
    inputs: Rows
    outputs: Rows


@dataclass(frozen=True)
class Words:
    """Rows of text that describe a manifest, as `exportkit inspect` prints them.

    Attributes:
        made_by: The versions that made it.
        source: The model that was exported.
        methods: The methods, in the manifest's order.
        state: Name, dtype and shape, bytes, which methods write and read it, what it begins with, what it is held to.
        cases: The calls of each case.
        targets: Name, and what it needs.
        libraries: File name, and what it has and needs; in the manifest's order.
        program: What the program was made with; None without a program.
        onnx: What the ONNX model is; empty for packages.
    """

    made_by: str
    source: str
    methods: Sequence[MethodWords]
    state: Rows
    cases: Sequence[str]
    targets: Rows
    libraries: Rows
    program: str | None
    onnx: Rows


def package_data(reader: PackageReader, words: Words, left_out: LeftOut) -> dict[str, Any]:
    """Describes an open package whose digests were checked. What is too much is noted in `left_out`."""
    manifest = reader.manifest
    sizes = {record.name: record.size for record in manifest.records}

    def shown(rows: Rows, what: str) -> Rows:
        return [list(row) for row in left_out.first(rows, left_out.limits.rows, what)]

    return {
        "name": manifest.name,
        "version": manifest.version,
        "file": {"name": reader.path.name, "size": reader.size, "sha256": reader.sha256},
        "manifest_sha256": reader.manifest_sha256,
        "made_by": words.made_by,
        "source": words.source,
        "program": words.program,
        "onnx": [list(row) for row in words.onnx],
        "signatures": _signatures(reader),
        "methods": [
            {
                "name": each.name,
                "inputs": shown(each.inputs, "inputs"),
                "outputs": shown(each.outputs, "outputs"),
                "dimensions": [
                    [d.name, d.min, d.max]
                    for d in left_out.first(method.call.dimensions, left_out.limits.rows, "dimensions")
                ],
            }
            for each, method in zip(words.methods, manifest.methods)
        ],
        "state": shown(words.state, "tensors of the state"),
        "targets": [[*row, code_bytes(manifest, row[0])] for row in shown(words.targets, "targets")],
        "operators": _operators(manifest, left_out),
        "libraries": [
            [*row, sizes.get(library.record, 0), library.sha256]
            for row, library in zip(shown(words.libraries, "libraries"), manifest.libraries)
        ],
        "weights": _weights(manifest.weights, left_out),
        "cases": [
            [text, sizes.get(case.record, 0), case.reference_dtype]
            for text, case in zip(words.cases, left_out.first(manifest.cases, left_out.limits.rows, "cases"))
        ],
        "records": _records(reader, left_out),
    }


def _signatures(reader: PackageReader) -> dict[str, Any]:
    files = [[info.path.name, list(info.key_ids), info.problem] for info in signature_info(reader)]
    return {"required": [[key.id, key.source] for key in reader.signers], "files": files}


def _operators(manifest: Manifest, left_out: LeftOut) -> list[list[Any]]:
    given = {defined.name: place for place, library in enumerate(manifest.libraries) for defined in library.defines}
    operators = left_out.first(manifest.operators, left_out.limits.rows, "operators")
    return [[operator.name, operator.schema, given.get(operator.name)] for operator in operators]


def _weights(weights: Sequence[Weight], left_out: LeftOut) -> dict[str, Any]:
    ordered = sorted(weights, key=lambda weight: (-_weight_bytes(weight), weight.name))
    rows = [
        [w.name, w.dtype, list(w.shape), _weight_bytes(w), w.state, len(w.aliases), w.record is not None]
        for w in left_out.first(ordered, left_out.limits.weights, "weights, which are smaller than those listed")
    ]
    stored = {weight.record: _weight_bytes(weight) for weight in weights if weight.record is not None}
    return {"count": len(weights), "state": sum(w.state for w in weights), "bytes": sum(stored.values()), "rows": rows}


def _weight_bytes(weight: Weight) -> int:
    return prod(weight.shape) * ITEM_BYTES.get(weight.dtype, 0)


def _records(reader: PackageReader, left_out: LeftOut) -> list[list[Any]]:
    """Returns the name, the size, the kind, the digest, the weight and whose code each record is, the largest first.

    Those that are left out have one row for each kind, so that the sizes add up.
    """
    owners: dict[str, str] = {}  # what a record of a weight is shown as
    for weight in reader.manifest.weights:
        if weight.record is not None:
            owners.setdefault(weight.record, weight.name)
    listed = sum(record.size for record in reader.manifest.records)
    code = _code_owners(reader.manifest)
    rows: list[list[Any]] = [
        [MANIFEST_NAME, max(0, reader.size - listed), "manifest and zip headers", None, None, None]
    ]
    for record in reader.manifest.records:
        kind = next((kind for start, kind in _KINDS.items() if record.name.startswith(start)), "other")
        whose = code.get(record.name.rpartition("/")[0])
        rows.append([record.name, record.size, kind, record.sha256, owners.get(record.name), whose])
    rows.sort(key=lambda row: (-row[1], row[0]))
    shown = list(left_out.first(rows, left_out.limits.rows, "records, which are smaller than those listed"))
    rest: dict[str, list[int]] = {}
    for _, size, kind, *_ in rows[len(shown) :]:
        rest.setdefault(kind, []).append(size)
    return shown + [
        [f"{len(found)} smaller records", sum(found), kind, None, None, None] for kind, found in rest.items()
    ]


def _code_owners(manifest: Manifest) -> dict[str, str]:
    """Returns whose code each folder has: the target and the method, where there are several."""
    owners = {}
    for target in manifest.targets:
        for method in manifest.methods:
            parts = [target.name] * (len(manifest.targets) > 1) + [method.name] * (len(manifest.methods) > 1)
            owners[f"{AOTINDUCTOR_DIR}/{code_folder(target.name, method.name)}"] = ", ".join(parts)
    return {folder: owner for folder, owner in owners.items() if owner}


def code_bytes(manifest: Manifest, target: str) -> int:
    """Returns the bytes of a target's code, of all methods."""
    folders = tuple(f"data/aotinductor/{code_folder(target, method.name)}/" for method in manifest.methods)
    return sum(record.size for record in manifest.records if record.name.startswith(folders))


# --- what compiled code calls ---------------------------------------------------------------------------------------


class _Call(msgspec.Struct, frozen=True):
    node: Node


class _Calls(msgspec.Struct, frozen=True):
    nodes: list[_Call]


# Made at import: exportkit.package.manifest says why.
_DECODER = msgspec.json.Decoder(_Calls)


def compiled_calls(reader: PackageReader, left_out: LeftOut) -> list[list[Any]]:
    """Returns the folder of code, the operator, and the arguments of each call of a custom operator, in order.

    AOTInductor writes them beside the code, as JSON of the same form as a program's nodes. Files of other forms have
    none. What it fused around them is machine code, so they are a list and no graph.
    """
    calls: list[list[Any]] = []
    manifest = reader.manifest
    folders = [code_folder(target.name, method.name) for target in manifest.targets for method in manifest.methods]
    for code in folders:
        folder = f"data/aotinductor/{code}/"
        for record in reader.manifest.records:
            if (
                record.name.startswith(folder)
                and record.name.endswith(".wrapper.json")
                and record.size <= _MAX_CALLS_BYTES
            ):
                calls += [[code, *_described(call.node)] for call in _decoded(reader.read(record.name))]
    return list(left_out.first(calls, left_out.limits.calls, "calls of operators by compiled code"))


def _decoded(content: bytes) -> list[_Call]:
    try:
        return _DECODER.decode(content).nodes
    except (msgspec.DecodeError, RecursionError):
        return []


def _described(node: Node) -> list[str]:
    try:
        arguments = [f"{each.name}={argument_text(each.arg)}" for each in node.inputs]
    except (KeyError, TypeError, AttributeError, ValueError):  # of another form
        arguments = ["?"]
    return [node.target, ", ".join(arguments)]
