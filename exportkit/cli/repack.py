"""`exportkit repack`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from exportkit.cli.app import command as exportkit_command
from exportkit.cli.output import progress
from exportkit.cli.package import pack_options, print_packed
from exportkit.cli.shared_options import EXISTING_FILE, op_library_option, output_option, weights_option
from exportkit.verify.options import VerifyOptions

if TYPE_CHECKING:
    from exportkit.package.keys import PrivateKey


@exportkit_command("repack", short_help="Replace a package's weights or libraries.")
@click.argument("package", type=EXISTING_FILE)
@output_option()
@weights_option("Replace the weights with another fine-tune's: the model's whole state_dict.")
@op_library_option(
    "A build of an operator library, or a Python module that loads some. It replaces the libraries with its name or "
    "its operators. Repeatable."
)
@click.option("--model-version", help="The model's new version.")
@click.option("--drop-target", "drop_targets", multiple=True, metavar="NAME", help="Leave out a target. Repeatable.")
@pack_options("PACKAGE", "PACKAGE")
def command(
    package: Path,
    output: Path,
    weights: Path | None,
    model_version: str | None,
    drop_targets: tuple[str, ...],
    verification: VerifyOptions,
    verify: bool,
    sign_key: PrivateKey | None,
    as_json: bool,
) -> None:
    """Replace weights or operator libraries of PACKAGE, without compiling, and verify it again.

    All other records stay byte for byte. The new package is written only if it passes. It may have PACKAGE's name:
    until then, PACKAGE stays as it is. An old signature is not taken over.

    With --weights the recorded answers cannot hold. They are recorded again, with the recorded inputs: by the eager
    model that --model names, with PACKAGE's own libraries if it loads none, else by the ExportedProgram if PACKAGE has
    one. If neither can, nothing is written.

    \b
    exportkit repack model.pt2 --weights tuned.safetensors --model net.py:Net --model-version 2 -o tuned.pt2
    exportkit repack model.pt2 --op-library build/libmyops.so --sign-key private.pem -o fixed.pt2
    exportkit repack model.pt2 --drop-target cuda_sm_90 -o cpu.pt2
    """  # noqa: D301 (click wants the control character, to keep the lines below it)
    with progress() as step:
        step("importing the packager")
        from exportkit.packaging import PackOptions
        from exportkit.repack.repacking import Changes, repack

        changes = Changes(weights, verification.eager.op_libraries, model_version, drop_targets)
        changed = repack(package, output, changes, PackOptions(verification, verify, sign_key), progress=step)
    print_packed(output, changed.manifest, changed.report, sign_key, as_json=as_json, done=changed.done)
