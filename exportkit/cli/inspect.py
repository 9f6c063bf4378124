"""`exportkit inspect`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from exportkit.cli.app import command as exportkit_command
from exportkit.cli.output import print_json, print_table, printable
from exportkit.cli.shared_options import OUTPUT_FILE, PACKAGE, public_key_options
from exportkit.package.trust import Trust
from exportkit.progress import bytes_text

if TYPE_CHECKING:
    from exportkit.package.archive import PackageReader


@exportkit_command("inspect")
@click.argument("artifact", type=PACKAGE)
@public_key_options("ARTIFACT")
@click.option("--sbom", type=OUTPUT_FILE, metavar="FILE.json", help="Write a bill of materials: SPDX 2.3, JSON.")
@click.option("--report", type=OUTPUT_FILE, metavar="FILE.html", help="Write a page with all of it, for a browser.")
def command(artifact: Path, trust: Trust, sbom: Path | None, report: Path | None, as_json: bool) -> None:
    """Show what an artifact or package holds, without running or importing any of it.

    Checks the archive, the manifest and every digest. Does not import torch. Shows the keys that the signature files
    beside ARTIFACT name; only --public-key checks the signatures.

    ARTIFACT may be an ONNX model: the package beside it describes it, and the digests of all its files are checked. It
    may also be a folder: an OCI layout of `exportkit oci`, or one with a single .pt2.

    --sbom lists what the package is made of: its libraries and code with digests, torch, compilers. SOURCE_DATE_EPOCH
    gives the document its time.

    --report writes the same as one page for a browser, with the errors of eager, the weights and every record. An
    existing file is replaced when the page is complete. `exportkit verify --report` adds the errors of compiled code.

    \b
    exportkit inspect arr_coc.pt2
    exportkit inspect arr_coc.pt2 --sbom arr_coc.spdx.json
    exportkit inspect arr_coc.pt2 --report arr_coc.html
    """  # noqa: D301 (click wants the control character, to keep the lines below it)
    from exportkit.cli.page import check_page, write_page
    from exportkit.inspect.sections import sections
    from exportkit.onnx.files import open_artifact
    from exportkit.package.atomic import check_writable, write_whole

    if report is not None:
        check_page(report, artifact)
    if sbom is not None:
        check_writable(sbom, read=[artifact])
    with open_artifact(artifact, demand=trust.demand() if trust != Trust() else None) as reader:
        written = {}
        if sbom is not None:
            from exportkit.package.sbom import package_sbom

            write_whole(sbom, package_sbom(reader))
            written[sbom] = "a bill of materials"
        if report is not None:
            write_page(report, reader)
            written[report] = f"{bytes_text(report.stat().st_size)}, for a browser"
        if as_json:
            print_json(_document(reader))
        elif written:
            for path, what in written.items():
                click.echo(f"{path}: {what}")
        else:
            for number, section in enumerate(sections(reader)):
                click.echo("\n" * (number > 0) + printable(section.title))
                print_table(section.rows)


def _document(reader: PackageReader) -> dict[str, Any]:
    from exportkit.package.compiled_with import compiled_with
    from exportkit.package.operators_gpus import operators_fits
    from exportkit.package.trust import signature_info

    targets = reader.manifest.targets
    return {
        "file": {"path": str(reader.path), "size": reader.size, "sha256": reader.sha256},
        "signatures": [dataclasses.asdict(info) for info in signature_info(reader)],
        "signed_by": [key.id for key in reader.signers],
        "manifest": msgspec.to_builtins(reader.manifest),
        "compiled_with": {each.name: vars(compiled_with(reader, each)) for each in targets},
        "operators_on_gpus": [
            {"target": fit.target.name, "operators": f"{fit.namespace}::*", "degree": fit.degree}
            for fit in operators_fits(reader.manifest, reader.read)
        ],
    }
