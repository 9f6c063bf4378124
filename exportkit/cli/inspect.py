"""`exportkit inspect`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from exportkit.cli.app import command as exportkit_command
from exportkit.cli.output import print_json, print_table, printable, size_text
from exportkit.cli.shared_options import EXISTING_FILE, public_key_options

if TYPE_CHECKING:
    from collections.abc import Sequence

    from exportkit.package.archive import PackageReader
    from exportkit.package.keys import PublicKey
    from exportkit.package.manifest import Manifest
    from exportkit.package.trust import SignatureInfo


@exportkit_command("inspect", short_help="Show what an artifact holds.")
@click.argument("artifact", type=EXISTING_FILE)
@public_key_options("ARTIFACT")
def command(artifact: Path, public_keys: tuple[Path, ...], signature: Path | None, as_json: bool) -> None:
    """Show what an artifact or package holds, without running or importing any of it.

    Checks the archive, the manifest and every digest. Does not import torch. Shows the keys that the signature files
    beside ARTIFACT name; only --public-key checks the signatures.

    ARTIFACT may be an ONNX model: the package beside it describes it, and the digests of all its files are checked.
    """
    import msgspec

    from exportkit.onnx.files import named_model, open_onnx
    from exportkit.package.archive import PackageReader
    from exportkit.package.trust import demand, signature_info

    asked = demand(public_keys or None, signature) if public_keys or signature is not None else None
    model = named_model(artifact)
    with PackageReader(artifact, demand=asked) if model is None else open_onnx(model, demand=asked) as reader:
        signers = reader.signers
        reader.verify()
        signatures = signature_info(reader)
        if as_json:
            file = {"path": str(reader.path), "size": reader.size, "sha256": reader.sha256}
            document: dict[str, Any] = {
                "file": file,
                "signatures": [dataclasses.asdict(info) for info in signatures],
                "signed_by": [key.id for key in signers],
                "manifest": msgspec.to_builtins(reader.manifest),
            }
            print_json(document)
        else:
            _print(reader, _signature_rows(signatures, signers))


def _signature_rows(signatures: Sequence[SignatureInfo], signers: Sequence[PublicKey]) -> list[tuple[str, str]]:
    rows = [("signed by", f"{key.id}, as required ({key.source})") for key in signers]
    for info in signatures:
        for key_id in info.key_ids:
            rows.append(("signature", f"{info.path.name} names {key_id}; --public-key checks it"))
        if info.problem is not None:
            rows.append(("signature", info.problem))
    return rows or [("signature", "none beside it")]


def _print(reader: PackageReader, signature_rows: Sequence[tuple[str, str]]) -> None:
    from exportkit.cli.describe import dimension_text, input_rows, library_text, onnx_rows, output_rows, target_text

    manifest = reader.manifest
    sizes = {record.name: record.size for record in manifest.records}
    click.echo(printable(f"{manifest.name} {manifest.version}"))
    print_table(
        [
            ("file", f"{reader.path}, {size_text(reader.size)}, {len(sizes) + 1} records, every digest holds"),
            ("sha256", reader.sha256),
            *signature_rows,
            ("made by", _provenance(manifest)),
            ("model", _source(manifest)),
        ]
    )
    click.echo("\nTakes")
    print_table(input_rows(manifest.call))
    if ranges := dimension_text(manifest.call):
        click.echo(f"  where {printable(ranges)}")
    click.echo("\nReturns")
    print_table(output_rows(manifest.call, manifest.cases))
    if manifest.onnx is None:
        click.echo("\nTargets")
        print_table([(t.name, target_text(t), size_text(_target_size(sizes, t.name))) for t in manifest.targets])
    else:
        click.echo("\nONNX model")
        print_table(onnx_rows(manifest.onnx))
    if manifest.weights:
        print_table([("weights", _weights_text(manifest, sizes))])
    if manifest.program is not None:
        program = manifest.program
        print_table([("program", f"ExportedProgram, {program.device.upper()}, torch {program.built_with_torch}")])
    if manifest.operators:
        click.echo("\nOperators")
        print_table(_operator_rows(manifest))
    if manifest.libraries:
        click.echo("\nLibraries")
        print_table([(Path(x.record).name, library_text(x), size_text(sizes[x.record])) for x in manifest.libraries])
    click.echo("\nCases")
    rows = [(f"case {i}", _sizes_text(c.sizes), size_text(sizes[c.record])) for i, c in enumerate(manifest.cases)]
    print_table(rows or [("none recorded",)])
    click.echo("\nRecords")
    print_table([(r.sha256[:16], size_text(r.size), r.name) for r in manifest.records])


def _weights_text(manifest: Manifest, sizes: dict[str, int]) -> str:
    records = {weight.record for weight in manifest.weights if weight.record is not None}
    state = sum(weight.state for weight in manifest.weights)
    return f"{state} that can be swapped, {size_text(sum(sizes[record] for record in records))} beside the code"


def _operator_rows(manifest: Manifest) -> list[tuple[str, str]]:
    from exportkit.cli.describe import functions_text, providers

    if manifest.onnx is not None:
        return [(functions_text(manifest.onnx, operator), operator.schema) for operator in manifest.operators]
    given = providers(manifest)
    missing = "not in this artifact; `exportkit package` adds it"
    return [
        (operator.schema, Path(library.record).name if (library := given[operator.name]) else missing)
        for operator in manifest.operators
    ]


def _provenance(manifest: Manifest) -> str:
    provenance = manifest.provenance
    text = f"exportkit {provenance.exportkit}, torch {provenance.torch}"
    if provenance.commit is not None:
        text += f", commit {provenance.commit[:12]}" + (" with uncommitted changes" if provenance.dirty else "")
    return text + (", TF32 on" if provenance.tf32 else "")


def _source(manifest: Manifest) -> str:
    source = manifest.source
    given = ", ".join(f"{name}={value!r}" for name, value in source.model_kwargs.items())
    return f"{source.model or 'not importable'}{f'({given})' if given else ''}, weights {source.state_sha256[:16]}..."


def _target_size(sizes: dict[str, int], target: str) -> int:
    return sum(size for name, size in sizes.items() if name.startswith(f"data/aotinductor/{target}/"))


def _sizes_text(sizes: dict[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items()) or "fixed sizes"
