"""`exportkit inspect`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from exportkit.cli.app import command as exportkit_command
from exportkit.cli.output import print_json, print_table, printable
from exportkit.cli.shared_options import EXISTING_FILE, OUTPUT_FILE, PACKAGE, public_key_options
from exportkit.package.case_files import edge_case_in
from exportkit.package.trust import Trust
from exportkit.progress import bytes_text
from exportkit.sizes import case_label

if TYPE_CHECKING:
    from collections.abc import Sequence

    from exportkit.package.archive import PackageReader
    from exportkit.package.keys import PublicKey
    from exportkit.package.manifest import Manifest, PackagedMethod
    from exportkit.package.trust import SignatureInfo
    from exportkit.report.package_data import Words

_NOT_HERE = "not in this artifact"


@exportkit_command("inspect", short_help="Show what an artifact holds.")
@click.argument("artifact", type=PACKAGE)
@public_key_options("ARTIFACT")
@click.option("--records", is_flag=True, help="List every record, with its digest and size.")
@click.option("--sbom", type=OUTPUT_FILE, metavar="FILE.json", help="Write a bill of materials: SPDX 2.3, JSON.")
@click.option("--report", type=OUTPUT_FILE, metavar="FILE.html", help="Write one page, for a browser.")
@click.option(
    "--verification",
    type=EXISTING_FILE,
    metavar="FILE.json",
    help="For --report: the errors of compiled code, from `exportkit verify ARTIFACT --json > FILE.json`.",
)
def command(
    artifact: Path,
    trust: Trust,
    records: bool,
    sbom: Path | None,
    report: Path | None,
    verification: Path | None,
    as_json: bool,
) -> None:
    """Show what an artifact or package holds, without running or importing any of it.

    Checks the archive, the manifest and every digest. Does not import torch. Shows the keys that the signature files
    beside ARTIFACT name; only --public-key checks the signatures.

    ARTIFACT may be an ONNX model: the package beside it describes it, and the digests of all its files are checked. It
    may also be a folder: an OCI layout of `exportkit oci`, or one with a single .pt2.

    --sbom lists what the package is made of: its libraries and code with digests, torch, compilers. SOURCE_DATE_EPOCH
    gives the document its time.

    --report writes one page that a browser shows without a network: the operators and their libraries, sizes, weights,
    and the recorded cases. An existing file is replaced when the page is complete.

    \b
    exportkit inspect arr_coc.pt2
    exportkit inspect arr_coc.pt2 --sbom arr_coc.spdx.json
    exportkit inspect arr_coc.pt2 --report arr_coc.html --verification verification.json
    """  # noqa: D301 (click wants the control character, to keep the lines below it)
    import msgspec

    from exportkit.onnx.files import named_model, open_onnx
    from exportkit.package.archive import PackageReader
    from exportkit.package.trust import signature_info

    _check_report(report, artifact, verification)
    asked = trust.demand() if trust != Trust() else None
    model = named_model(artifact)
    with PackageReader(artifact, demand=asked) if model is None else open_onnx(model, demand=asked) as reader:
        signers = reader.signers
        reader.verify()
        signatures = signature_info(reader)
        if as_json:
            from exportkit.package.compiled_with import compiled_with, missed_kernels
            from exportkit.package.operators_gpus import operators_fits

            file = {"path": str(reader.path), "size": reader.size, "sha256": reader.sha256}
            document: dict[str, Any] = {
                "file": file,
                "signatures": [dataclasses.asdict(info) for info in signatures],
                "signed_by": [key.id for key in signers],
                "manifest": msgspec.to_builtins(reader.manifest),
                "compiled_with": {each.name: vars(compiled_with(reader, each)) for each in reader.manifest.targets},
                "missed_kernels": {each.name: missed_kernels(reader, each) for each in reader.manifest.targets},
                "operators_on_gpus": [
                    {"target": fit.target.name, "operators": f"{fit.namespace}::*", "degree": fit.degree}
                    for fit in operators_fits(reader.manifest, reader.read)
                ],
            }
        if sbom is not None:
            from exportkit.package.atomic import write_whole
            from exportkit.package.sbom import package_sbom

            write_whole(sbom, package_sbom(reader))
        if report is not None:
            from exportkit.report.report_page import write_report

            size = write_report(reader, _words(reader), verification, report)
        if as_json:
            print_json(document)
        elif report is not None or sbom is not None:
            if sbom is not None:
                click.echo(f"{sbom}: a bill of materials")
            if report is not None:
                click.echo(f"{report}: {bytes_text(size)}, for a browser")
        else:
            _print(reader, _signature_rows(signatures, signers))
            if records:
                click.echo("\nRecords")
                print_table([(r.sha256[:16], bytes_text(r.size), r.name) for r in reader.manifest.records])


def _check_report(report: Path | None, artifact: Path, verification: Path | None) -> None:
    """Refuses what could not be written, before the work on it."""
    if report is None:
        if verification is not None:
            raise click.UsageError("--verification is for a report: name the page with --report FILE.html.")
        return
    if report.suffix != ".html":
        raise click.UsageError(f"--report {report}: give a file that ends in .html.")
    if report.exists() and any(path is not None and report.samefile(path) for path in (artifact, verification)):
        raise click.UsageError(f"--report {report}: the page would replace a file that it is made from.")
    from exportkit.package.atomic import check_writable

    check_writable(report)


def _words(reader: PackageReader) -> Words:
    from exportkit.cli.describe import input_rows, library_text, onnx_rows, output_rows, state_rows, target_text
    from exportkit.report.package_data import MethodWords, Words

    manifest = reader.manifest
    return Words(
        made_by=_provenance(manifest),
        source=_source(manifest),
        methods=[
            MethodWords(each.name, tuple(input_rows(each.call)), tuple(output_rows(each, manifest.cases)))
            for each in manifest.methods
        ],
        state=tuple(state_rows(manifest)),
        cases=[case_label(case, edge_case_in(reader, case)) for case in manifest.cases],
        targets=[(target.name, target_text(target)) for target in manifest.targets],
        libraries=[(Path(library.record).name, library_text(library)) for library in manifest.libraries],
        program=_program_text(manifest),
        onnx=tuple(onnx_rows(manifest)),
    )


def _program_text(manifest: Manifest) -> str | None:
    program = manifest.program
    return None if program is None else f"ExportedProgram, {program.device.upper()}, torch {program.built_with_torch}"


def _signature_rows(signatures: Sequence[SignatureInfo], signers: Sequence[PublicKey]) -> list[tuple[str, str]]:
    rows = [("signed by", f"{key.id}, as required ({key.source})") for key in signers]
    for info in signatures:
        for key_id in info.key_ids:
            rows.append(("signature", f"{info.path.name} names {key_id}; --public-key checks it"))
        if info.problem is not None:
            rows.append(("signature", info.problem))
    return rows or [("signature", "none beside it")]


def _print(reader: PackageReader, signature_rows: Sequence[tuple[str, str]]) -> None:
    from exportkit.cli.describe import library_text, onnx_rows, operators_rows, state_rows, target_text
    from exportkit.package.compiled_with import compiled_with, missed_kernels
    from exportkit.report.package_data import code_bytes

    manifest = reader.manifest
    sizes = {record.name: record.size for record in manifest.records}
    click.echo(printable(f"{manifest.name} {manifest.version}"))
    print_table(
        [
            ("file", f"{reader.path}, {bytes_text(reader.size)}, {len(sizes) + 1} records, every digest holds"),
            ("sha256", reader.sha256),
            *signature_rows,
            ("made by", _provenance(manifest)),
            ("model", _source(manifest)),
        ]
    )
    for method in manifest.methods:
        _print_method(method, manifest)
    if manifest.state:
        click.echo("\nState")
        print_table(state_rows(manifest))
    if not manifest.onnx:
        click.echo("\nTargets")
        print_table([(t.name, target_text(t), bytes_text(code_bytes(manifest, t.name))) for t in manifest.targets])
        given = [(t.name, f"compiled with {a}") for t in manifest.targets if (a := compiled_with(reader, t).arguments)]
        print_table(given)
        missed = [(t.name, line) for t in manifest.targets for line in missed_kernels(reader, t)]
        print_table([(name, f"no fast kernel: {line}") for name, line in missed])
        print_table(operators_rows(reader))
    else:
        click.echo("\nONNX model")
        print_table(onnx_rows(manifest))
    if manifest.weights:
        print_table([("weights", _weights_text(manifest, sizes))])
    if (program := _program_text(manifest)) is not None:
        print_table([("program", program)])
    if manifest.operators:
        click.echo("\nOperators")
        operators = _operator_rows(manifest)
        print_table(operators)
        if any(library == _NOT_HERE for library, _ in operators):
            click.echo("  `exportkit package` adds the libraries")
    if manifest.libraries:
        click.echo("\nLibraries")
        print_table([(Path(x.record).name, library_text(x), bytes_text(sizes[x.record])) for x in manifest.libraries])
    click.echo("\nCases")
    rows = [
        (f"case {i}", case_label(c, edge_case_in(reader, c)), bytes_text(sizes[c.record]))
        for i, c in enumerate(manifest.cases)
    ]
    print_table(rows or [("none recorded",)])


def _print_method(method: PackagedMethod, manifest: Manifest) -> None:
    from exportkit.cli.describe import dimension_text, input_rows, output_rows

    alone = len(manifest.methods) == 1
    name = printable(method.name)
    click.echo("\nTakes" if alone else f"\nMethod {name} takes")
    print_table(list(input_rows(method.call)) or [("no tensors",)])
    if ranges := dimension_text(method.call):
        click.echo(f"  where {printable(ranges)}")
    click.echo("\nReturns" if alone else f"\nMethod {name} returns")
    print_table(list(output_rows(method, manifest.cases)) or [("no tensors",)])


def _weights_text(manifest: Manifest, sizes: dict[str, int]) -> str:
    records = {weight.record for weight in manifest.weights if weight.record is not None}
    state = sum(weight.state for weight in manifest.weights)
    return f"{state} that can be swapped, {bytes_text(sum(sizes[record] for record in records))} beside the code"


def _operator_rows(manifest: Manifest) -> list[tuple[str, str]]:
    """Says first which library or function answers, since a schema may be long."""
    from exportkit.cli.describe import functions_text, providers

    if manifest.onnx:
        return [(functions_text(manifest.onnx, operator), operator.schema) for operator in manifest.operators]
    given = providers(manifest)
    return [
        (Path(library.record).name if (library := given[operator.name]) else _NOT_HERE, operator.schema)
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
