"""`exportkit triton`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from exportkit.cli.app import command as exportkit_command
from exportkit.cli.output import print_json
from exportkit.cli.shared_options import ARTIFACT, flag, public_key_options
from exportkit.package.trust import Trust

_FOLDER = click.Path(file_okay=False, path_type=Path)


@exportkit_command("triton")
@click.argument("package", type=ARTIFACT)
@click.argument("options", nargs=-1, metavar="[-- OPTION...]")
@click.option("-o", "--output", type=_FOLDER, required=True, metavar="REPOSITORY", help="Triton's model repository.")
@click.option("--method", "methods", multiple=True, metavar="NAME", help="Repeatable. Default: the default method.")
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads of a call. Default: as many as torch takes.")
@flag("--cuda-graphs", "Make calls on a GPU one launch each.")
@flag("--run", "Start Triton, if it is installed, in the place of this process.")
@public_key_options("PACKAGE")
def command(
    package: Path,
    options: Sequence[str],
    output: Path,
    methods: Sequence[str],
    threads: int | None,
    cuda_graphs: bool,
    run: bool,
    trust: Trust,
    as_json: bool,
) -> None:
    """Write PACKAGE into a model repository of Triton, and print the command that starts Triton with our backend.

    Checks every digest first, and the signatures that --public-key or this machine's policies require; Triton then
    requires the key, too. Each method becomes a model: NAME, or NAME.METHOD if it is not the default one, as
    `exportkit serve` names them. A model that is there stays, and must be the same. OPTIONs are Triton's own.

    The command keeps Triton to this machine, and lets clients change models, map memory and write files only with the
    header `exportkit-key` (gRPC: `triton-grpc-protocol-exportkit-key`), whose value is new each time.

    \b
    exportkit triton model.pt2 -o repository/
    exportkit triton model.pt2 -o repository/ --run -- --http-port=9000
    """  # noqa: D301 (click wants the control character, to keep the lines below it)
    from exportkit.deployment.triton import run_triton, triton_command, write_triton_models

    start = triton_command(output, trust=trust, options=options)
    parameters = {**({"threads": str(threads)} if threads else {}), **({"cuda_graphs": "true"} if cuda_graphs else {})}
    models = write_triton_models(package, output, methods=methods, parameters=parameters, trust=trust)
    if as_json:
        print_json({"models": [model._asdict() for model in models], **start._asdict(), "found": start.found})
    else:
        for model in models:
            was = "" if model.written else " (there already)"
            click.echo(f"{model.folder}  {model.method}{was}")
        click.echo(start.text)
    if run:
        sys.stdout.flush()
        run_triton(start)
    elif not start.found:
        click.echo("Triton is not on this machine: `pip install nvidia-pytriton` brings it.", err=True)
