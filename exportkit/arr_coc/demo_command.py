"""`exportkit demo`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

from exportkit.cli.app import command as exportkit_command
from exportkit.cli.output import print_json, print_table, progress


@exportkit_command("demo", short_help="Run every step on a photograph.")
@click.option(
    "--photograph",
    type=click.Choice(["astronaut", "chelsea", "coffee"]),
    default="astronaut",
    help="A photograph from scikit-image.",
)
@click.option(
    "-o",
    "--output",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("artifacts"),
    help="The folder for the artifact, the package and the picture.",
)
def command(photograph: str, folder: Path, as_json: bool) -> None:
    """Export, package, verify and run the ARR-COC model on a real photograph.

    The model gets an encoder that needs no training. A fresh process, which can import neither the exporter nor the
    model, loads the package and finds where the photograph resembles one of its regions. The picture shows which
    patches are kept, and how many tokens each may spend.
    """
    with progress() as step:
        step("importing the pipeline")
        from exportkit.arr_coc.demo import run_demo

        result = run_demo(folder, photograph=photograph, progress=step)
    if as_json:
        print_json(dataclasses.asdict(result))
        return
    print_table([(step.name, f"{step.seconds:6.1f} s", step.detail) for step in result.steps])
    total = sum(step.seconds for step in result.steps)
    click.echo(f"  {total:.1f} s in all\nLook at {result.picture}")
