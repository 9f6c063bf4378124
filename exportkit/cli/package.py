"""`exportkit package`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from exportkit.cli.app import command as exportkit_command
from exportkit.cli.output import print_json, print_table, printable, progress
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
from exportkit.package.trust import Trust
from exportkit.progress import bytes_text
from exportkit.reference_model import ReferenceModel
from exportkit.verify.options import VerifyOptions

if TYPE_CHECKING:
    from exportkit.package.keys import PrivateKey
    from exportkit.package.manifest import Manifest
    from exportkit.verify.report import Report

F = TypeVar("F", bound=Callable[..., Any])


def pack_options(artifact: str, recorded: str) -> Callable[[F], F]:
    """The options of commands that write, verify and sign a package.

    The command gets them as `verification`, `verify` and `sign_key`.

    Args:
        artifact: What must be signed, in the help.
        recorded: What recorded MODEL, in the help.
    """
    options = (
        click.option(
            "--sign-key", type=EXISTING_FILE, metavar="PRIVATE.pem", help="Sign the package as `exportkit sign` does."
        ),
        public_key_options(artifact),
        device_option("Verify the targets of this device; auto: every target that runs here.", default="auto"),
        model_option(recorded),
        timeout_option,
        click.option(
            "--no-verify", is_flag=True, help="Do not run the package, for example because no target runs here."
        ),
    )

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def packing(
            *args: Any,
            sign_key: Path | None,
            trust: Trust,
            device: str,
            model: str | None,
            op_libraries: tuple[Path | str, ...],
            timeout: int,
            no_verify: bool,
            **others: Any,
        ) -> Any:
            from exportkit.package.keys import read_private_key

            key = read_private_key(sign_key, ask_password) if sign_key is not None else None
            eager = ReferenceModel(model, op_libraries=op_libraries)
            verification = VerifyOptions(against="cases", device=device, eager=eager, timeout=timeout, trust=trust)
            return function(*args, verification=verification, verify=not no_verify, sign_key=key, **others)

        made: Any = packing
        for option in reversed(options):
            made = option(made)
        return made

    return decorate


@exportkit_command("package", short_help="Add operator libraries, and verify.")
@click.argument("artifacts", type=EXISTING_FILE, nargs=-1, required=True, metavar="ARTIFACT...")
@output_option()
@op_library_option(
    "An operator library that the model calls, or a Python module that loads some. Repeatable. Default: the libraries "
    "that importing --model loads. Those that installed packages declare are added if needed.",
)
@click.option("--name", help="The package's name. Default: the first artifact's.")
@click.option("--model-version", "version", help="The model's version. Default: the first artifact's.")
@weights_option("Of one package: replace the weights with another fine-tune's, the model's whole state_dict.")
@click.option(
    "--drop-target",
    "drop_targets",
    multiple=True,
    metavar="NAME",
    help="Of one package: leave out a target. Repeatable.",
)
@pack_options("each ARTIFACT", "the first artifact")
def command(
    artifacts: tuple[Path, ...],
    output: Path,
    weights: Path | None,
    drop_targets: tuple[str, ...],
    verification: VerifyOptions,
    verify: bool,
    sign_key: PrivateKey | None,
    as_json: bool,
    **named: str | None,
) -> None:
    """Put compiled artifacts, operator libraries, manifest and cases into one .pt2, and verify it.

    Several artifacts become the targets of one package; the loader picks the target that runs on its machine. Each
    target that runs here replays the recorded cases in a fresh process. The package is written only if all of them
    pass. Packaging therefore runs the code of each ARTIFACT. If --public-key or this machine's policy requires
    signatures, each ARTIFACT must be signed before any of it runs. The package is signed last, after it passed.

    One ARTIFACT that is a package already is changed, without compiling: an --op-library takes the place of those
    with its name or its operators, and all other records stay byte for byte. It may be the output, too: until the new
    package has passed, it stays as it is. An old signature is not taken over.

    With --weights the recorded answers cannot hold. They are recorded again, with the recorded inputs: by the eager
    model that --model names, else by the ExportedProgram if the package has one. If neither can, nothing is written.

    \b
    exportkit package arr_coc_aoti.pt2 -o arr_coc.pt2
    exportkit package cpu.pt2 cuda.pt2 --op-library build/libmyops.so -o model.pt2
    exportkit package model.pt2 --weights tuned.safetensors --model net.py:Net --model-version 2 -o tuned.pt2
    exportkit package model.pt2 --drop-target cuda_sm_90 -o cpu.pt2
    """  # noqa: D301 (click wants the control character, to keep the lines below it)
    with progress() as step:
        step("importing the packager")
        from exportkit.child.process import start_forkserver_early

        start_forkserver_early()
        from exportkit.packaging import PackOptions, build_package
        from exportkit.repack.repacking import Changes, is_package, repack

        options = PackOptions(verification, verify, sign_key)
        changes = Changes(weights, verification.eager.op_libraries, drop_targets=drop_targets, **named)
        of_one = weights is not None or drop_targets
        if of_one and len(artifacts) > 1:
            raise click.UsageError("--weights and --drop-target change one package: put the artifacts together first.")
        if of_one or (len(artifacts) == 1 and changes != Changes() and is_package(artifacts[0], verification.trust)):
            changed = repack(artifacts[0], output, changes, options, progress=step)
            manifest, report, done = changed.manifest, changed.report, changed.done
        else:
            manifest, report = build_package(artifacts, output, options, progress=step, **named)
            done = None
    print_packed(output, manifest, report, sign_key, as_json=as_json, done=done)


def print_packed(
    output: Path,
    manifest: Manifest,
    report: Report | None,
    sign_key: PrivateKey | None,
    *,
    as_json: bool,
    done: Sequence[str] | None = None,
) -> None:
    """Prints a new package, and exits with the code of its verification.

    Args:
        output: The package's name.
        manifest: Its manifest.
        report: The report of its verification; None if it was skipped. It was written if it passed.
        sign_key: The key that signed it.
        as_json: Whether to print JSON.
        done: What was changed in an older package, a line for each; None if it was put together.
    """
    from exportkit.cli.describe import library_text, operators_rows, target_text
    from exportkit.cli.verify import print_report, report_document
    from exportkit.package.archive import PackageReader
    from exportkit.package.signing import signature_path

    # The package was verified under a temporary name.
    report = dataclasses.replace(report, artifact=str(output)) if report is not None else None
    written = report is None or report.exit_code == 0
    signed = signature_path(output, sign_key) if written and sign_key is not None else None
    if as_json:
        import msgspec

        document: Mapping[str, Any] = {
            "file": {"path": str(output), "size": output.stat().st_size} if written else None,
            "signature": str(signed) if signed is not None else None,
            **({} if done is None else {"done": done}),
            "verification": report_document(report) if report is not None else None,
            "manifest": msgspec.to_builtins(manifest),
        }
        print_json(document)
    else:
        click.echo(f"{output}  {bytes_text(output.stat().st_size)}" if written else f"{output} was not written")
        for line in done or ():
            click.echo(f"  {printable(line)}")
        if signed is not None and sign_key is not None:
            click.echo(f"{signed}: signed by key {sign_key.public.id}")
        elif written and done is not None:
            click.echo("  not signed: --sign-key signs it")
        if done is None:
            print_table([("target", target.name, target_text(target)) for target in manifest.targets])
            print_table([("library", Path(item.record).name, library_text(item)) for item in manifest.libraries])
        if written and any(target.device == "cuda" for target in manifest.targets):
            with PackageReader(output) as reader:
                print_table(operators_rows(reader))
        if report is None:
            click.echo("not verified: --no-verify")
        else:
            print_report(report)
            if report.exit_code == HostError.exit_code:
                click.echo("It may run elsewhere: --no-verify writes it without running it here.")
    if report is not None and report.exit_code:
        raise click.exceptions.Exit(report.exit_code)
