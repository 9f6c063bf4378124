"""`exportkit pull`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from exportkit.cli.app import command as exportkit_command
from exportkit.cli.output import print_json, progress
from exportkit.cli.registry_options import REFERENCE, registry_options
from exportkit.cli.shared_options import OUTPUT_FILE, byte_size, public_key_options
from exportkit.package.trust import Trust
from exportkit.progress import bytes_text
from exportkit.registry.oci_reference import RegistryReference

if TYPE_CHECKING:
    from exportkit.registry.registry_client import RegistryOptions


@exportkit_command("pull", short_help="Get a package from a registry of containers.")
@click.argument("reference", type=REFERENCE, metavar="oci://HOST/NAME[:TAG][@DIGEST]")
@click.option("-o", "--output", type=OUTPUT_FILE, help="The .pt2 to write. Default: the last part of NAME, with .pt2.")
@public_key_options("the package")
@click.option(
    "--max-size", "max_bytes", callback=byte_size, metavar="SIZE", help="Refuse a larger package, such as 20GB."
)
@registry_options
def command(
    reference: RegistryReference,
    output: Path | None,
    trust: Trust,
    max_bytes: int | None,
    registry: Callable[[], RegistryOptions],
    as_json: bool,
) -> None:
    """Get a package and its signatures. The file appears when its digest and the required signatures were checked.

    A digest names one package for ever, and a tag the one that it names now. Policies that demand signatures hold as
    they do for a load. What was cut goes on where it was, when the command is given again. Nothing of the package runs.

    The password is that of docker's configuration: `docker login HOST` writes it. Needs the extra `registry`.

    \b
    exportkit pull oci://registry.example/models/net:1 --public-key release.pub.pem
    exportkit pull oci://registry.example/models/net@sha256:... -o net.pt2
    """  # noqa: D301 (click wants the control character, to keep the lines below it)
    from exportkit.registry.pull import pull

    path = Path(reference.file_name) if output is None else output
    with progress() as step:
        pulled = pull(reference, path, trust=trust, options=registry(), max_bytes=max_bytes, step=step)
    if as_json:
        print_json(
            {
                "reference": str(pulled.reference),
                "path": str(pulled.path),
                "sha256": pulled.sha256,
                "size": pulled.size,
                "signatures": [str(path) for path in pulled.signatures],
                "signed_by": [key.id for key in pulled.signers],
            }
        )
        return
    signed = [f"signed by {key.id}, as required ({key.source})" for key in pulled.signers]
    beside = [f"{path.name} beside it, not checked" for path in pulled.signatures] or ["no signature"]
    click.echo(f"{pulled.path}: {bytes_text(pulled.size)}, its digest holds; {'; '.join(signed or beside)}")
    click.echo(str(pulled.reference))
