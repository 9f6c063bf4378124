"""`exportkit triton`."""

from __future__ import annotations

from pathlib import Path

import click

from exportkit.cli.app import command as exportkit_command
from exportkit.cli.output import print_json, print_table
from exportkit.cli.shared_options import EXISTING_FILE, public_key_options
from exportkit.package.trust import Trust

_FOLDER = click.Path(file_okay=False, path_type=Path)


@exportkit_command("triton", short_help="Write a model repository for Triton.")
@click.argument("package", type=EXISTING_FILE)
@click.option(
    "-o",
    "--output",
    type=_FOLDER,
    required=True,
    metavar="REPOSITORY",
    help="The model repository; the model's folder in it must not exist yet.",
)
@click.option("--method", metavar="NAME", help="The method to write: one without state. Default: the default method.")
@click.option("--target", metavar="NAME", help="The target that Triton shall run. Default: the only one.")
@public_key_options("PACKAGE")
def command(
    package: Path,
    output: Path,
    method: str | None,
    target: str | None,
    trust: Trust,
    as_json: bool,
) -> None:
    """Write PACKAGE as a model of Triton's PyTorch backend (platform torch_aoti), and print how to start Triton.

    Checks every digest first, and the signatures that --public-key or this machine's policy requires. Runs nothing and
    does not import torch. The folder REPOSITORY/<name> gets config.pbtxt, the package with one target, the operator
    libraries to preload, and a README.md. The weights must be inside of the code: export with --embed-weights.
    Another method than the default one goes to REPOSITORY/<name>.<method>. Methods with state are refused.

    \b
    exportkit export arr-coc --embed-weights -o arr_coc_aoti.pt2
    exportkit package arr_coc_aoti.pt2 -o arr_coc.pt2
    exportkit triton arr_coc.pt2 -o repository/
    """  # noqa: D301 (click wants the control character, to keep the lines below it)
    from exportkit.deployment.triton_repository import write_triton_model

    model = write_triton_model(package, output, method=method, target=target, demand=trust.demand())
    if as_json:
        print_json(
            {
                "folder": str(model.folder),
                "target": model.target,
                "libraries": [str(library) for library in model.libraries],
                "inputs": model.inputs,
                "outputs": model.outputs,
                "command": model.command,
            }
        )
        return
    click.echo(f"{model.folder}  target {model.target}")
    rows = [("input", *item) for item in model.inputs.items()] + [("output", *item) for item in model.outputs.items()]
    print_table([*rows, *(("library", str(library)) for library in model.libraries)])
    click.echo(model.command)
