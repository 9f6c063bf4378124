"""`exportkit push`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from exportkit.cli.app import command as exportkit_command
from exportkit.cli.output import print_json, progress
from exportkit.cli.registry_options import REFERENCE, registry_options
from exportkit.cli.shared_options import EXISTING_FILE
from exportkit.progress import bytes_text
from exportkit.registry.oci_reference import RegistryReference

if TYPE_CHECKING:
    from exportkit.registry.registry_client import RegistryOptions


@exportkit_command("push", short_help="Put a package into a registry of containers.")
@click.argument("reference", type=REFERENCE, metavar="oci://HOST/NAME:TAG")
@click.argument("package", type=EXISTING_FILE)
@click.option(
    "--image", is_flag=True, help="Make an image with the files in /models, for what mounts images, not for `pull`."
)
@registry_options
def command(
    reference: RegistryReference,
    package: Path,
    image: bool,
    registry: Callable[[], RegistryOptions],
    as_json: bool,
) -> None:
    """Check every digest in PACKAGE, and put it into a registry of containers with the signature files beside it.

    It becomes an OCI artifact of one layer, and each signature becomes one that refers to it. What the registry has is
    not sent again, and a connection that is cut goes on where it was. Prints the reference by digest, which names this
    package for ever; the tag is set last.

    The password is that of docker's configuration: `docker login HOST` writes it. Needs the extra `registry`.

    \b
    exportkit push oci://registry.example/models/net:1 net.pt2
    """  # noqa: D301 (click wants the control character, to keep the lines below it)
    from exportkit.registry.push import push

    with progress() as step:
        pushed = push(package, reference, registry(), image=image, step=step)
    if as_json:
        print_json(
            {
                "reference": str(pushed.reference),
                "tag": reference.tag,
                "sha256": pushed.sha256,
                "size": pushed.size,
                "sent": pushed.sent,
                "signatures": [str(path) for path in pushed.signatures],
            }
        )
        return
    signatures = ", ".join(path.name for path in pushed.signatures) or "no signature"
    was = bytes_text(pushed.size) if pushed.sent else "already there"
    click.echo(f"{package} ({was}), {signatures}: {reference}")
    click.echo(str(pushed.reference))
