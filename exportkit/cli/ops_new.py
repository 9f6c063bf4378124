"""`exportkit ops new`."""

from __future__ import annotations

from pathlib import Path

import click

from exportkit.cli.app import command as exportkit_command
from exportkit.cli.output import print_json

# As exportkit.operators.scaffold has them, which would import more than --help needs.
KINDS = ("elementwise", "rows", "reduction", "empty")


@exportkit_command("new", short_help="Write a new operator that works.")
@click.argument("name")
@click.option("--package", metavar="NAME", help="The Python package that gets the operator; written if there is none.")
@click.option(
    "--kind",
    type=click.Choice(KINDS),
    default="elementwise",
    help="The shape of its work: y = f(x), each row of [..., D] by itself, a row to a value, or a copy to start from.",
)
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="The package's folder. Default: the working folder if it has the package, else a new folder in it.",
)
def command(name: str, package: str | None, kind: str, output: Path | None, as_json: bool) -> None:
    """Write the operator NAME: kernels in C++ and CUDA, and its Python side with fake, gradient, reference and tests.

    With --package, they become a package that stands alone and depends on torch only, or they are added to the package
    that is there. In a package's folder, --package may be left out. What is written compiles and passes its tests;
    change it into what you need. No file is overwritten.

    \b
    exportkit ops new leaky --package my_ops
    cd my_ops && python setup.py build_ext --inplace && pytest
    """  # noqa: D301 (click wants the control character, to keep the lines below it)
    from exportkit.operators.scaffold.new_operator import NewOperator, write_operator

    written = write_operator(NewOperator(name, package, kind, Path.cwd(), output))
    if as_json:
        print_json({"folder": written.folder, "package": written.package, "files": written.files})
        return
    for file in written.files:
        click.echo(str(written.folder / file))
    where = "" if written.folder == Path.cwd() else f"cd {written.folder} && "
    click.echo(f"Next: {where}python setup.py build_ext --inplace && pytest")
