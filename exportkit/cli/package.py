"""`exportkit package`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

import click

from exportkit.cli.app import command as exportkit_command
from exportkit.cli.output import print_json, print_table, progress
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


@exportkit_command("package", short_help="Add operator libraries, and verify.")
@click.argument("artifacts", type=EXISTING_FILE, nargs=-1, required=True, metavar="ARTIFACT...")
@output_option()
@op_library_option(
    "An operator library that the model calls, or a Python module that loads some. Repeatable. Default: the libraries "
    "that importing MODEL loads, unless signatures are required. Libraries of exportkit are added if needed.",
)
@click.option("--name", help="The package's name. Default: the first artifact's.")
@click.option("--model-version", help="The model's version. Default: the first artifact's.")
@weights_option("Replace the weights with another fine-tune's: the model's whole state_dict.")
@click.option(
    "--sign-key", type=EXISTING_FILE, metavar="PRIVATE.pem", help="Sign the package as `exportkit sign` does."
)
@public_key_options("each ARTIFACT")
@device_option("Verify the targets of this device; auto: every target that runs here.", default="auto")
@model_option("the first artifact")
@timeout_option
@click.option("--no-verify", is_flag=True, help="Do not run the package, for example because no target runs here.")
def command(
    artifacts: tuple[Path, ...],
    output: Path,
    op_libraries: tuple[Path | str, ...],
    name: str | None,
    model_version: str | None,
    weights: Path | None,
    sign_key: Path | None,
    public_keys: tuple[Path, ...],
    signature: Path | None,
    device: str,
    model: str | None,
    timeout: int,
    no_verify: bool,
    as_json: bool,
) -> None:
    """Put compiled artifacts, operator libraries, manifest and cases into one .pt2, and verify it.

    Several artifacts become the targets of one package; the loader picks the target that runs on its machine. Each
    target that runs here replays the recorded cases in a fresh process. The package is written only if all of them
    pass. Packaging therefore runs the code of each ARTIFACT. If --public-key or this machine's policy requires
    signatures, each ARTIFACT must be signed before any of it runs. The package is signed last, after it passed.

    With --weights nothing is compiled. The package has no cases, because the recorded outputs belong to the old
    weights. It is compared with the eager model instead, if MODEL can be imported; otherwise --no-verify writes it. If
    signatures are required, --model must name MODEL.

    \b
    exportkit package arr_coc_aoti.pt2 -o arr_coc.pt2
    exportkit package cpu.pt2 cuda.pt2 --op-library build/libmyops.so -o model.pt2
    exportkit package model.pt2 --weights tuned.safetensors --name tuned -o tuned.pt2
    """  # noqa: D301 (click wants the control character, to keep the lines below it)
    from exportkit.package.keys import read_private_key
    from exportkit.package.signing import signature_path

    private = read_private_key(sign_key, ask_password) if sign_key is not None else None
    signed = signature_path(output, private) if private is not None else None
    with progress() as step:
        step("importing the packager")
        import msgspec

        from exportkit.packaging import build_package
        from exportkit.verify.options import VerifyOptions

        # The recorded cases belong to the old weights.
        against: Literal["cases", "eager"] = "cases" if weights is None else "eager"
        options = VerifyOptions(against=against, device=device, model=model, weights=weights, timeout=timeout)
        manifest, report = build_package(
            artifacts,
            output,
            op_libraries=op_libraries,
            name=name,
            version=model_version,
            weights=weights,
            sign_key=private,
            verify_options=None if no_verify else options,
            progress=step,
            public_keys=public_keys,
            signature=signature,
        )
    # The package was verified under a temporary name.
    report = dataclasses.replace(report, artifact=str(output)) if report is not None else None
    written = report is None or report.exit_code == 0
    if as_json:
        from exportkit.cli.verify import report_document

        print_json(
            {
                "file": {"path": str(output), "size": output.stat().st_size} if written else None,
                "signature": str(signed) if written and signed is not None else None,
                "verification": report_document(report) if report is not None else None,
                "manifest": msgspec.to_builtins(manifest),
            }
        )
    else:
        from exportkit.cli.describe import library_text, target_text
        from exportkit.cli.verify import print_report

        click.echo(f"{output}  {bytes_text(output.stat().st_size)}" if written else f"{output} was not written")
        if written and private is not None:
            click.echo(f"{signed}: signed by key {private.public.id}")
        print_table([("target", target.name, target_text(target)) for target in manifest.targets])
        print_table([("library", Path(item.record).name, library_text(item)) for item in manifest.libraries])
        if report is not None:
            print_report(report)
            if report.exit_code == HostError.exit_code:
                click.echo("It may run elsewhere: --no-verify writes it without running it here.")
        else:
            click.echo("not verified: --no-verify")
    if report is not None and report.exit_code:
        raise click.exceptions.Exit(report.exit_code)
