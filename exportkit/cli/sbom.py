"""`exportkit sbom`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from exportkit.cli.app import command as exportkit_command
from exportkit.cli.output import print_json
from exportkit.cli.shared_options import EXISTING_FILE, OUTPUT_FILE, public_key_options
from exportkit.package.trust import Trust


@exportkit_command("sbom", short_help="List what a package is made of.")
@click.argument("package", type=EXISTING_FILE)
@public_key_options("PACKAGE")
@click.option("-o", "--output", type=OUTPUT_FILE, help="The file to write. Default: stdout.")
def command(package: Path, trust: Trust, output: Path | None, as_json: bool) -> None:
    """Write a bill of materials of PACKAGE in SPDX 2.3 (JSON): its libraries and code with digests, torch, compilers.

    It has what the manifest says. Every digest is checked, and nothing of the package runs. SOURCE_DATE_EPOCH gives the
    document its time.

    \b
    exportkit sbom model.pt2 -o model.spdx.json
    """  # noqa: D301 (click wants the control character, to keep the lines below it)
    from exportkit.package.archive import PackageReader
    from exportkit.package.atomic import write_whole
    from exportkit.package.sbom import package_sbom

    with PackageReader(package, demand=trust.demand() if trust != Trust() else None) as reader:
        reader.verify()
        content = package_sbom(reader)
    if output is not None:
        write_whole(output, content)
    if as_json:
        print_json({"path": None if output is None else str(output), "document": json.loads(content)})
    elif output is None:
        click.echo(content.decode(), nl=False)
    else:
        click.echo(f"{output}: {len(json.loads(content)['packages']) - 1} components")
