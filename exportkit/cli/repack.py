"""`exportkit repack`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

from exportkit.cli.app import command as exportkit_command
from exportkit.cli.output import print_json, printable, progress
from exportkit.cli.shared_options import (
    EXISTING_FILE,
    device_option,
    model_option,
    op_library_option,
    output_option,
    public_key_options,
    timeout_option,
    weights_option,
)
from exportkit.cli.sign import ask_password
from exportkit.errors import HostError
from exportkit.sizes import bytes_text


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
@click.option(
    "--sign-key", type=EXISTING_FILE, metavar="PRIVATE.pem", help="Sign the package as `exportkit sign` does."
)
@public_key_options("PACKAGE")
@device_option("Verify the targets of this device; auto: every target that runs here.", default="auto")
@model_option("PACKAGE")
@timeout_option
@click.option("--no-verify", is_flag=True, help="Do not run the package, for example because no target runs here.")
def command(
    package: Path,
    output: Path,
    weights: Path | None,
    op_libraries: tuple[Path | str, ...],
    model_version: str | None,
    drop_targets: tuple[str, ...],
    sign_key: Path | None,
    public_keys: tuple[Path, ...],
    signature: Path | None,
    device: str,
    model: str | None,
    timeout: int,
    no_verify: bool,
    as_json: bool,
) -> None:
    """Replace weights or operator libraries of PACKAGE, without compiling, and verify it again.

    All other records stay byte for byte. The new package is written only if it passes. It may have PACKAGE's name:
    until then, PACKAGE stays as it is. An old signature is not taken over.

    With --weights the recorded answers cannot hold. They are recorded again, with the recorded inputs: by the eager
    model if MODEL can be imported, else by the ExportedProgram if PACKAGE has one. If neither can, nothing is written.
    If signatures are required, --model must name MODEL.

    \b
    exportkit repack model.pt2 --weights tuned.safetensors --model-version 2 -o tuned.pt2
    exportkit repack model.pt2 --op-library build/libmyops.so --sign-key private.pem -o fixed.pt2
    exportkit repack model.pt2 --drop-target cuda_sm_90 -o cpu.pt2
    """  # noqa: D301 (click wants the control character, to keep the lines below it)
    from exportkit.package.keys import read_private_key
    from exportkit.package.signing import signature_path

    private = read_private_key(sign_key, ask_password) if sign_key is not None else None
    signed = signature_path(output, private) if private is not None else None
    with progress() as step:
        step("importing the packager")
        import msgspec

        from exportkit.repack.repacking import Changes, repack
        from exportkit.verify.options import VerifyOptions

        changed = repack(
            package,
            output,
            Changes(weights, op_libraries, model_version, drop_targets),
            sign_key=private,
            verify_options=None if no_verify else VerifyOptions(device=device, timeout=timeout),
            model=model,
            public_keys=public_keys,
            signature=signature,
            progress=step,
        )
    # The package was verified under a temporary name.
    report = dataclasses.replace(changed.report, artifact=str(output)) if changed.report is not None else None
    written = report is None or report.exit_code == 0
    if as_json:
        from exportkit.cli.verify import report_document

        print_json(
            {
                "file": {"path": str(output), "size": output.stat().st_size} if written else None,
                "signature": str(signed) if written and signed is not None else None,
                "done": changed.done,
                "verification": report_document(report) if report is not None else None,
                "manifest": msgspec.to_builtins(changed.manifest),
            }
        )
    else:
        from exportkit.cli.verify import print_report

        click.echo(f"{output}  {bytes_text(output.stat().st_size)}" if written else f"{output} was not written")
        for line in changed.done:
            click.echo(f"  {printable(line)}")
        if written and private is not None:
            click.echo(f"{signed}: signed by key {private.public.id}")
        elif written:
            click.echo("  not signed: --sign-key signs it")
        if report is not None:
            print_report(report)
            if report.exit_code == HostError.exit_code:
                click.echo("It may run elsewhere: --no-verify writes it without running it here.")
        else:
            click.echo("not verified: --no-verify")
    if report is not None and report.exit_code:
        raise click.exceptions.Exit(report.exit_code)
