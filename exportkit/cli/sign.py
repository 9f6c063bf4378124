"""`exportkit sign`."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from exportkit.cli.app import command as exportkit_command
from exportkit.cli.output import print_json, printable
from exportkit.cli.shared_options import ARTIFACT, EXISTING_FILE, OUTPUT_FILE
from exportkit.errors import UsageError

if TYPE_CHECKING:
    from exportkit.package.external_key import SignInput
    from exportkit.package.keys import SigningKey


@exportkit_command("sign")
@click.argument("package", type=ARTIFACT)
@click.option("--key", type=EXISTING_FILE, metavar="PRIVATE.pem", help="The signer's private key.")
@click.option("--sign-command", metavar="COMMAND", help="Sign by this command instead; see above.")
@click.option("--public-key", type=EXISTING_FILE, metavar="KEY.pem", help="The public key of --sign-command.")
@click.option(
    "--sign-input",
    type=click.Choice(["message", "digest"]),
    default="message",
    help="What the command gets: the bytes to be signed, or their digest by the curve's hash.",
)
@click.option("--sign-timeout", type=click.FloatRange(min=0.1), default=60.0, help="Seconds for the command.")
@click.option("-o", "--output", type=OUTPUT_FILE, help="The signature. Default: PACKAGE.sig, or PACKAGE.sigstore.json.")
def command(
    package: Path,
    key: Path | None,
    sign_command: str | None,
    public_key: Path | None,
    sign_input: SignInput,
    sign_timeout: float,
    output: Path | None,
    as_json: bool,
) -> None:
    """Check every digest in PACKAGE and sign it. The signature is a small file beside it.

    An Ed25519 key makes exportkit's own signature file, which can hold the signatures of several keys. A key on the
    curve P-256, P-384 or P-521 makes a bundle of OpenSSF model signing, which OpenSSF's tools check as well. The
    password of an encrypted key is read from EXPORTKIT_KEY_PASSWORD or asked for.

    --sign-command is for keys in hardware and key services. The command gets what is to be signed on stdin, and writes
    the signature to stdout, as bytes or in base64: 64 bytes of Ed25519; for a curve DER, or r and s. No shell runs it.
    Nothing is written unless the answer is the signature of --public-key.

    PACKAGE may be an ONNX model. The package beside it is signed, which has the digests of the model and its weights.

    \b
    openssl genpkey -algorithm ed25519 -out private.pem
    openssl pkey -in private.pem -pubout -out public.pem
    exportkit sign arr_coc.pt2 --key private.pem
    exportkit verify arr_coc.pt2 --public-key public.pem
    """  # noqa: D301 (click wants the control character, to keep the lines below it)
    from exportkit.onnx.files import named_model, refuse_sidecar, sign_onnx
    from exportkit.package.archive import PackageReader
    from exportkit.package.external_key import command_key
    from exportkit.package.keys import read_private_key
    from exportkit.package.signing import sign_package

    if (key is None) == (sign_command is None):
        raise click.UsageError("Give the private key: either --key or --sign-command.")
    if (public_key is None) != (sign_command is None):
        raise click.UsageError("--sign-command and --public-key belong together: the key checks the command's answer.")
    private: SigningKey
    if key is not None:
        private = read_private_key(key, ask_password)
        if key.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
            click.echo(f"warning: other users can read {printable(str(key))}: run `chmod 600` on it", err=True)
    else:
        assert sign_command is not None
        assert public_key is not None
        private = command_key(sign_command, public_key, sign_input, sign_timeout)
    if (model := named_model(package)) is not None:
        written = sign_onnx(model, private, output)
    else:
        with PackageReader(package) as reader:
            refuse_sidecar(reader)
            written = sign_package(package, private, output, manifest_sha256=reader.manifest_sha256)
    if as_json:
        print_json({"package": str(package), "signature": str(written), "key_id": private.public.id})
    else:
        click.echo(f"{written}: signed by key {private.public.id}")


def ask_password() -> str:
    """Returns the password of an encrypted key, from the environment or a prompt.

    The password is never an argument, because every process of the machine can read arguments.

    Raises:
        UsageError: EXPORTKIT_KEY_PASSWORD is not set, and stdin is not a terminal.
    """
    if (password := os.environ.get("EXPORTKIT_KEY_PASSWORD")) is not None:
        return password
    if not sys.stdin.isatty():
        raise UsageError("the private key is encrypted", hint="Set EXPORTKIT_KEY_PASSWORD to its password.")
    answer: str = click.prompt("Password of the private key", hide_input=True, err=True)
    return answer
