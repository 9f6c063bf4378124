"""`exportkit demo`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

from exportkit.cli.app import command as exportkit_command
from exportkit.cli.output import print_json, print_table, progress


@exportkit_command("demo", short_help="The whole path, on a photograph.")
@click.option(
    "--photograph",
    type=click.Choice(["astronaut", "chelsea", "coffee"]),
    default="astronaut",
    show_default=True,
    help="One of those that come with scikit-image.",
)
@click.option(
    "-o",
    "--output",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("artifacts"),
    show_default=True,
    help="The folder for the artifact, the package and the picture.",
)
def command(photograph: str, folder: Path, as_json: bool) -> None:
    """Take the ARR-COC model the whole path, on a real photograph.

    Exports it with an encoder that needs no training, packages it, verifies it, loads it in a fresh process that can
    import neither exporter nor model, asks it where the photograph is like one of its own regions, and draws the
    answer: which patches are kept, and how many tokens each may spend.
    """
    with progress() as step:
        step("importing the pipeline")
        from exportkit.demo import run_demo

        result = run_demo(folder, photograph=photograph, progress=step)
    if as_json:
        print_json(dataclasses.asdict(result))
        return
    print_table([(step.name, f"{step.seconds:6.1f} s", step.detail) for step in result.steps])
    total = sum(step.seconds for step in result.steps)
    click.echo(f"  {total:.1f} s in all\nLook at {result.picture}")
