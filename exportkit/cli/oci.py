"""`exportkit oci`."""

from __future__ import annotations

from pathlib import Path

import click

from exportkit.cli.app import command as exportkit_command
from exportkit.cli.output import print_json
from exportkit.cli.shared_options import ARTIFACT
from exportkit.progress import bytes_text


@exportkit_command("oci")
@click.argument("package", type=ARTIFACT)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    required=True,
    metavar="DIR",
    help="The folder to write, which must be a new one.",
)
def command(package: Path, output: Path, as_json: bool) -> None:
    """Check every digest in PACKAGE, and write it with its signature files as an OCI image layout.

    skopeo and oras put it into a registry of containers and get it from there. `load`, `serve`, `verify` and `inspect`
    take such a folder as they take a file, with its signatures. It is a model of the CNCF's ModelPack specification.
    The same files give the same digest, which names this package for ever.

    \b
    exportkit oci net.pt2 -o net
    skopeo copy oci:net docker://registry.example/models/net:1
    skopeo copy docker://registry.example/models/net@sha256:... oci:here
    exportkit serve here --public-key release.pub.pem
    """  # noqa: D301 (click wants the control character, to keep the lines below it)
    from exportkit.package.oci_layout import write_layout

    layout = write_layout(package, output)
    if as_json:
        print_json({"path": output, **layout._asdict()})
        return
    signatures = ", ".join(layout.signatures) or "no signature"
    click.echo(f"{output}: {package.name}, {bytes_text(layout.size)}, {signatures}")
    click.echo(layout.digest)
