"""`exportkit package`."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from exportkit.cli.app import command as exportkit_command
from exportkit.cli.output import print_json, print_table, progress
from exportkit.cli.shared_options import (
    ARTIFACT,
    EXISTING_FILE,
    device_option,
    flag,
    model_option,
    op_library_option,
    output_option,
    public_key_options,
    repeatable,
    timeout_option,
    weights_option,
)
from exportkit.cli.sign import ask_password
from exportkit.errors import HostError
from exportkit.package.trust import Trust
from exportkit.progress import bytes_text
from exportkit.reference_model import ReferenceModel
from exportkit.verify.options import VerifyOptions

if TYPE_CHECKING:
    from exportkit.package.keys import PrivateKey
    from exportkit.package.manifest import Manifest
    from exportkit.verify.report import Report


@exportkit_command("package", common=("output", "op_libraries", "name", "version", "weights", "model", "sign_key"))
@click.argument("artifacts", type=ARTIFACT, nargs=-1, required=True, metavar="ARTIFACT...")
@output_option()
@op_library_option(
    "An operator library that the model calls, or a Python module that loads some. Repeatable. Default: the libraries "
    "that importing --model loads. Those that installed packages declare are added if needed.",
)
@click.option("--name", help="The package's name. Default: the first artifact's.")
@click.option("--model-version", "version", help="The model's version. Default: the first artifact's.")
@weights_option("Replace the weights with another fine-tune's: the model's whole state_dict.")
@repeatable(
    "--attestation",
    "FILE.json",
    "An in-toto statement about an operator library, as `exportkit ops check --candidate` writes it.",
    to="attestations",
    type=EXISTING_FILE,
)
@click.option(
    "--sign-key", type=EXISTING_FILE, metavar="PRIVATE.pem", help="Sign the package as `exportkit sign` does."
)
@public_key_options("each ARTIFACT")
@device_option("Verify the targets of this device; auto: every target that runs here.", default="auto")
@model_option("the first artifact")
@timeout_option
@flag("--no-verify", "Do not run the package, for example because no target runs here.")
def command(
    artifacts: tuple[Path, ...],
    output: Path,
    op_libraries: tuple[Path | str, ...],
    name: str | None,
    version: str | None,
    weights: Path | None,
    attestations: tuple[Path, ...],
    sign_key: Path | None,
    trust: Trust,
    device: str,
    model: str | None,
    timeout: int,
    no_verify: bool,
    as_json: bool,
) -> None:
    """Put compiled artifacts, operator libraries, manifest and cases into one .pt2, and verify it.

    Several artifacts become the targets of one package; the loader picks the target that runs on its machine. Each
    target that runs here replays the recorded cases in a fresh process. The package is written only if none of them
    fails. If outputs cannot be judged, because eager itself moves by as much, it is written, and the exit code is 21.
    Packaging therefore runs the code of each ARTIFACT. If --public-key or this machine's policy requires signatures,
    each ARTIFACT must be signed before any of it runs. The package is signed last, after it passed.

    ARTIFACT may be a package, and the output, too: until the new package has passed, the old one stays as it is.

    With --weights nothing is compiled, but the recorded answers cannot hold. The eager model that --model names records
    them again, with the recorded inputs.

    \b
    exportkit package arr_coc_aoti.pt2 -o arr_coc.pt2
    exportkit package cpu.pt2 cuda.pt2 --op-library build/libmyops.so -o model.pt2
    exportkit package model.pt2 --weights tuned.safetensors --model net.py:Net --model-version 2 -o tuned.pt2
    """  # noqa: D301 (click wants the control character, to keep the lines below it)
    from exportkit.package.keys import read_private_key

    key = read_private_key(sign_key, ask_password) if sign_key is not None else None
    eager = ReferenceModel(model, op_libraries=op_libraries)
    verification = VerifyOptions(against="cases", device=device, eager=eager, timeout=timeout, trust=trust)
    with progress() as step:
        step("importing the packager")
        from exportkit.child.process import start_forkserver_early

        start_forkserver_early()
        from exportkit.packaging import PackOptions, build_package

        options = PackOptions(verification, not no_verify, key, attestations)
        manifest, report = build_package(
            artifacts, output, options, name=name, version=version, weights=weights, progress=step
        )
    _print(output, manifest, report, key, as_json)
    if report is not None and report.exit_code:
        raise click.exceptions.Exit(report.exit_code)


def _print(output: Path, manifest: Manifest, report: Report | None, sign_key: PrivateKey | None, as_json: bool) -> None:
    """Prints a new package. It was written if nothing in its verification failed, or it was skipped."""
    from exportkit.cli.verify import print_report, report_document
    from exportkit.inspect.rows import library_rows, operators_rows, target_rows
    from exportkit.package.archive import PackageReader
    from exportkit.package.signing import signature_path

    # The package was verified under a temporary name.
    report = dataclasses.replace(report, artifact=str(output)) if report is not None else None
    written = report is None or not report.wrong
    signed = signature_path(output, sign_key) if written and sign_key is not None else None
    if as_json:
        import msgspec

        print_json(
            {
                "file": {"path": str(output), "size": output.stat().st_size} if written else None,
                "signature": str(signed) if signed is not None else None,
                "verification": report_document(report) if report is not None else None,
                "manifest": msgspec.to_builtins(manifest),
            }
        )
        return
    click.echo(f"{output}  {bytes_text(output.stat().st_size)}" if written else f"{output} was not written")
    if signed is not None and sign_key is not None:
        click.echo(f"{signed}: signed by key {sign_key.public.id}")
    print_table([("target", *row) for row in target_rows(manifest)])
    print_table([("library", *row) for row in library_rows(manifest)])
    if written and any(target.device == "cuda" for target in manifest.targets):
        with PackageReader(output) as reader:
            print_table(operators_rows(reader))
    if report is None:
        click.echo("not verified: --no-verify")
        _print_not_compiled(output, manifest)
        return
    print_report(report, written=written)
    if written and report.exit_code:
        click.echo("The package was written: nothing failed.")
    if report.exit_code == HostError.exit_code:
        click.echo("It may run elsewhere: --no-verify writes it without running it here.")
    if written:
        _print_not_compiled(output, manifest)


def _print_not_compiled(output: Path, manifest: Manifest) -> None:
    """Says of a package of a program alone that nothing loads it yet, and what makes one that loads."""
    if manifest.program is None or manifest.targets:
        return
    click.echo(
        f"Nothing in it is compiled, so exportkit.load refuses it. Next: exportkit export {shlex.quote(str(output))} "
        "-o COMPILED.pt2, and package that."
    )
