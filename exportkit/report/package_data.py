"""What the page says about an artifact, as plain values. Texts that `inspect` prints too are made by the caller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from exportkit.package.archive import PackageReader
from exportkit.package.dtypes import ITEM_BYTES
from exportkit.package.manifest import MANIFEST_NAME, Manifest, Weight
from exportkit.package.trust import signature_info
from exportkit.report.untrusted import first

MOST_ROWS = 1000  # of a table
_LARGEST = 200  # weights that are listed

# The kinds of records, by the beginnings of their names. The rest is small: what torch's reader looks for.
_KINDS = {
    "data/aotinductor/": "compiled code",
    "data/weights/": "weights",
    "exportkit/ops/": "operator libraries",
    "exportkit/cases/": "cases",
    "exportkit/program": "program",
}

Rows = Sequence[Sequence[str]]


@dataclass(frozen=True)
class Words:
    """Rows of text that describe a manifest, as `exportkit inspect` prints them.

    Attributes:
        made_by: The versions that made it.
        source: The model that was exported.
        inputs: Name, and dtype and shape.
        outputs: Name, dtype and shape, and what it is held to.
        targets: Name, and what it needs.
        libraries: File name, and what it has and needs; in the manifest's order.
        program: What the program was made with; None without a program.
        onnx: What the ONNX model is; empty for packages.
    """

    made_by: str
    source: str
    inputs: Rows
    outputs: Rows
    targets: Rows
    libraries: Rows
    program: str | None
    onnx: Rows


def package_data(reader: PackageReader, words: Words, left_out: list[str]) -> dict[str, Any]:
    """Describes an open package whose digests were checked. What is too much is noted in `left_out`."""
    manifest = reader.manifest
    sizes = {record.name: record.size for record in manifest.records}

    def shown(rows: Rows, what: str) -> Rows:
        return [list(row) for row in first(rows, MOST_ROWS, what, left_out)]

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
        "inputs": shown(words.inputs, "inputs"),
        "outputs": shown(words.outputs, "outputs"),
        "dimensions": [
            [d.name, d.min, d.max] for d in first(manifest.call.dimensions, MOST_ROWS, "dimensions", left_out)
        ],
        "targets": [
            [*row, _bytes_under(sizes, f"data/aotinductor/{row[0]}/")] for row in shown(words.targets, "targets")
        ],
        "operators": _operators(manifest, left_out),
        "libraries": [
            [*row, sizes.get(library.record, 0), library.sha256]
            for row, library in zip(shown(words.libraries, "libraries"), manifest.libraries)
        ],
        "weights": _weights(manifest.weights, left_out),
        "cases": [
            [case.sizes, sizes.get(case.record, 0), case.reference_dtype]
            for case in first(manifest.cases, MOST_ROWS, "cases", left_out)
        ],
        "records": _records(reader, left_out),
    }


def _signatures(reader: PackageReader) -> dict[str, Any]:
    files = [[info.path.name, list(info.key_ids), info.problem] for info in signature_info(reader)]
    return {"required": [[key.id, key.source] for key in reader.signers], "files": files}


def _operators(manifest: Manifest, left_out: list[str]) -> list[list[Any]]:
    given = {defined.name: place for place, library in enumerate(manifest.libraries) for defined in library.defines}
    operators = first(manifest.operators, MOST_ROWS, "operators", left_out)
    return [[operator.name, operator.schema, given.get(operator.name)] for operator in operators]


def _weights(weights: Sequence[Weight], left_out: list[str]) -> dict[str, Any]:
    ordered = sorted(weights, key=lambda weight: (-_weight_bytes(weight), weight.name))
    rows = [
        [w.name, w.dtype, list(w.shape), _weight_bytes(w), w.state, len(w.aliases), w.record is not None]
        for w in first(ordered, _LARGEST, "weights, which are smaller than those listed", left_out)
    ]
    stored = {weight.record: _weight_bytes(weight) for weight in weights if weight.record is not None}
    return {"count": len(weights), "state": sum(w.state for w in weights), "bytes": sum(stored.values()), "rows": rows}


def _weight_bytes(weight: Weight) -> int:
    return prod(weight.shape) * ITEM_BYTES.get(weight.dtype, 0)


def _records(reader: PackageReader, left_out: list[str]) -> list[list[Any]]:
    """Returns the name, the size, the kind, the digest and the weight of each record, the largest first.

    Those that are left out have one row for each kind, so that the sizes add up.
    """
    owners: dict[str, str] = {}  # what a record of a weight is shown as
    for weight in reader.manifest.weights:
        if weight.record is not None:
            owners.setdefault(weight.record, weight.name)
    listed = sum(record.size for record in reader.manifest.records)
    rows: list[list[Any]] = [[MANIFEST_NAME, max(0, reader.size - listed), "manifest and zip headers", None, None]]
    for record in reader.manifest.records:
        kind = next((kind for start, kind in _KINDS.items() if record.name.startswith(start)), "other")
        rows.append([record.name, record.size, kind, record.sha256, owners.get(record.name)])
    rows.sort(key=lambda row: (-row[1], row[0]))
    shown = list(first(rows, MOST_ROWS, "records, which are smaller than those listed", left_out))
    rest: dict[str, list[int]] = {}
    for _, size, kind, _, _ in rows[len(shown) :]:
        rest.setdefault(kind, []).append(size)
    return shown + [[f"{len(found)} smaller records", sum(found), kind, None, None] for kind, found in rest.items()]


def _bytes_under(sizes: Mapping[str, int], folder: str) -> int:
    return sum(size for name, size in sizes.items() if name.startswith(folder))
