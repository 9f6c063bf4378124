"""`exportkit revoke`."""

from __future__ import annotations

import re
from pathlib import Path

import click
import msgspec

from exportkit.cli.app import command as exportkit_command
from exportkit.cli.output import print_json
from exportkit.cli.shared_options import EXISTING_FILE, OUTPUT_FILE, repeatable
from exportkit.errors import UsageError

_KEY_ID = re.compile("[0-9a-f]{64}")
_MAX_REASON_BYTES = 200


@exportkit_command("revoke")
@click.argument("revocation_list", metavar="LIST", type=OUTPUT_FILE)
@repeatable("--key", "KEY.pem|ID", "A public key, or its id.", to="keys")
@click.option("--package", "packages", type=EXISTING_FILE, multiple=True, help="A package. Repeatable.")
@click.option("--merge", "others", type=EXISTING_FILE, multiple=True, help="Another list. Repeatable.")
@click.option("--reason", default="", show_default=False, help="Why, for the message of those who are refused.")
def command(
    revocation_list: Path,
    keys: tuple[str, ...],
    packages: tuple[Path, ...],
    others: tuple[Path, ...],
    reason: str,
    as_json: bool,
) -> None:
    """Add keys and packages to LIST, which a policy names; make LIST if there is none.

    Machines whose policy names the list no longer accept these keys' signatures, nor open these packages. Entries never
    leave a list. Its sequence number rises with each change, and a policy can demand a lowest one.

    \b
    exportkit revoke revoked.json --key old.pub.pem --reason "stolen laptop"
    exportkit revoke revoked.json --package model.pt2 --reason "wrong weights"
    """  # noqa: D301 (click wants the control character, to keep the lines below it)
    from exportkit.package.archive import PackageReader
    from exportkit.package.revocation import read_revocations, revoke

    if not keys and not packages and not others:
        raise click.UsageError("Name what is revoked: --key, --package or --merge.")
    if len(reason.encode()) > _MAX_REASON_BYTES:
        raise click.UsageError(f"--reason has {len(reason.encode())} bytes; at most {_MAX_REASON_BYTES} are allowed.")
    digests = {}
    for package in packages:
        with PackageReader(package) as reader:
            digests[reader.manifest_sha256] = reason
    lists = [found for other in others if (found := read_revocations(other)) is not None]
    made = revoke(revocation_list, {_key_id(key): reason for key in keys}, digests, lists)
    if as_json:
        print_json({"path": str(revocation_list), **msgspec.to_builtins(made)})
    else:
        entries = f"revoked keys: {len(made.keys)}, revoked packages: {len(made.packages)}"
        click.echo(f"{revocation_list}: sequence {made.sequence}, {entries}")


def _key_id(key: str) -> str:
    """Returns the id of a key that is named by it or by its file."""
    from exportkit.package.keys import read_public_key

    if _KEY_ID.fullmatch(key):
        return key
    if not Path(key).exists():
        raise UsageError(f"--key {key}: there is no such file, and a key's id has 64 hexadecimal digits in lower case")
    return read_public_key(key).id
