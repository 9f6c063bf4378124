"""What `exportkit inspect` says of an artifact, section by section. Nothing here prints or imports torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

from exportkit.inspect.rows import (
    NOT_HERE,
    dimension_text,
    input_rows,
    library_rows,
    onnx_rows,
    operator_rows,
    operators_rows,
    output_rows,
    state_rows,
    target_rows,
)
from exportkit.package.archive import PackageReader
from exportkit.package.attestations import attestation_rows
from exportkit.package.case_files import edge_case_in, recorded_errors, recorded_state_errors, worst
from exportkit.package.compiled_with import compiled_with
from exportkit.package.dtypes import ITEM_BYTES
from exportkit.package.manifest import Manifest, code_folder
from exportkit.package.trust import signature_info
from exportkit.progress import bytes_text
from exportkit.sizes import case_label


class Section(NamedTuple):
    """A heading, and the rows below it. A row of one cell is a remark."""

    title: str
    rows: Sequence[Sequence[str]]


def sections(reader: PackageReader) -> list[Section]:
    """Describes an open artifact whose digests were checked. No section is empty."""
    manifest = reader.manifest
    sizes = {record.name: record.size for record in manifest.records}
    found = [Section(f"{manifest.name} {manifest.version}", _origin(reader)), *_methods(manifest)]
    found.append(Section("State", [*state_rows(manifest)]))
    if manifest.onnx:
        found.append(Section("ONNX model", [*onnx_rows(manifest)]))
    else:
        found.append(Section("Targets", [*_targets(reader)]))
    found.append(Section("Weights and program", [*_weights(manifest, sizes)]))
    operators = operator_rows(manifest)
    lacking = [("`exportkit package` adds the libraries",)] * any(library == NOT_HERE for library, _ in operators)
    found.append(Section("Operators", [*operators, *lacking]))
    libraries = [
        (*row, bytes_text(sizes[library.record])) for row, library in zip(library_rows(manifest), manifest.libraries)
    ]
    found.append(Section("Libraries", libraries))
    found.append(Section("Attestations", [*attestation_rows(reader)]))
    cases = [
        (f"case {number}", case_label(case, edge_case_in(reader, case)), bytes_text(sizes[case.record]))
        for number, case in enumerate(manifest.cases)
    ]
    found.append(Section("Cases", cases or [("none recorded",)]))
    return [section for section in found if section.rows]


def details(reader: PackageReader) -> list[Section]:
    """Describes what a page has room for: eager's errors, the weights and the records, the largest ones first."""
    manifest = reader.manifest
    errors = {each.name: recorded_errors(manifest.cases, each.name) for each in manifest.methods}
    errors["state"] = recorded_state_errors(manifest.cases)
    rows = [
        (of, name, f"rms {worst(each).rms:.3g}", f"greatest {worst(each).greatest:.3g}")
        for of, found in errors.items()
        for name, each in found.items()
    ]
    weights = [
        (prod(each.shape) * ITEM_BYTES.get(each.dtype, 0), ", ".join((each.name, *each.aliases)), each)
        for each in manifest.weights
    ]
    ordered = [
        (name, f"{each.dtype}{list(each.shape)}", bytes_text(size))
        for size, name, each in sorted(weights, key=lambda item: (-item[0], item[1]))
    ]
    records = sorted(manifest.records, key=lambda record: (-record.size, record.name))
    listed = [
        Section("Eager's errors against a reference of a wider dtype", rows),
        Section("Weights", ordered),
        Section("Records", [(record.name, bytes_text(record.size), record.sha256) for record in records]),
    ]
    return [section for section in listed if section.rows]


def _origin(reader: PackageReader) -> list[tuple[str, str]]:
    manifest, source, provenance = reader.manifest, reader.manifest.source, reader.manifest.provenance
    rows = [
        ("file", f"{reader.path}, {bytes_text(reader.size)}, {len(manifest.records) + 1} records, every digest holds"),
        ("sha256", reader.sha256),
    ]
    signed = [("signed by", f"{key.id}, as required ({key.source})") for key in reader.signers]
    for info in signature_info(reader):
        signed += [("signature", f"{info.path.name} names {key}; --public-key checks it") for key in info.key_ids]
        signed += [("signature", info.problem)] if info.problem is not None else []
    made_by = f"exportkit {provenance.exportkit}, torch {provenance.torch}"
    if provenance.commit is not None:
        made_by += f", commit {provenance.commit[:12]}" + (" with uncommitted changes" if provenance.dirty else "")
    given = ", ".join(f"{name}={value!r}" for name, value in source.model_kwargs.items())
    model = f"{source.model or 'not importable'}{f'({given})' if given else ''}, weights {source.state_sha256[:16]}..."
    return [
        *rows,
        *(signed or [("signature", "none beside it")]),
        ("made by", made_by + (", TF32 on" if provenance.tf32 else "")),
        ("model", model),
    ]


def _methods(manifest: Manifest) -> Iterator[Section]:
    for method in manifest.methods:
        alone = len(manifest.methods) == 1
        takes: list[Sequence[str]] = [*input_rows(method.call)] or [("no tensors",)]
        if ranges := dimension_text(method.call):
            takes.append((f"where {ranges}",))
        yield Section("Takes" if alone else f"Method {method.name} takes", takes)
        returns = [*output_rows(method, manifest.cases)] or [("no tensors",)]
        yield Section("Returns" if alone else f"Method {method.name} returns", returns)


def _targets(reader: PackageReader) -> Iterator[Sequence[str]]:
    manifest = reader.manifest
    for row, target in zip(target_rows(manifest), manifest.targets):
        yield *row, bytes_text(code_bytes(manifest, target.name))
        if arguments := compiled_with(reader, target).arguments:
            yield target.name, f"compiled with {arguments}"
    yield from operators_rows(reader)


def code_bytes(manifest: Manifest, target: str) -> int:
    """Returns the bytes of a target's code, of all methods."""
    folders = tuple(f"data/aotinductor/{code_folder(target, method.name)}/" for method in manifest.methods)
    return sum(record.size for record in manifest.records if record.name.startswith(folders))


def _weights(manifest: Manifest, sizes: dict[str, int]) -> Iterator[tuple[str, str]]:
    if manifest.weights:
        stored = {weight.record for weight in manifest.weights if weight.record is not None}
        state = sum(weight.state for weight in manifest.weights)
        size = bytes_text(sum(sizes[record] for record in stored))
        yield "weights", f"{state} that can be swapped, {size} beside the code"
    if (program := manifest.program) is not None:
        yield "program", f"ExportedProgram, {program.device.upper()}, torch {program.built_with_torch}"
