"""`exportkit ops build`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from exportkit.cli.app import command as exportkit_command
from exportkit.cli.output import print_json, print_table, printable, progress
from exportkit.errors import ExportkitError, UsageError

if TYPE_CHECKING:
    from exportkit.scaffold.build_library import BuiltLibrary


@exportkit_command("build", short_help="Build operators, once or at every change.")
@click.argument(
    "folder", type=click.Path(exists=True, file_okay=False, path_type=Path), default=Path("."), metavar="[DIR]"
)
@click.option("--watch", is_flag=True, help="Build again whenever a source file changes, until Ctrl-C.")
@click.option("--with-symbols", is_flag=True, help="Build with symbols for a debugger, and without optimisation.")
def command(folder: Path, watch: bool, with_symbols: bool, as_json: bool) -> None:
    """Build the operators in DIR, and say what a fresh process finds in the libraries.

    DIR has a setup.py, such as `exportkit ops new` writes, or is a checkout of exportkit. Only what changed is
    compiled. Ctrl-C ends the compilers too, and a build that was killed leaves nothing that the next one waits for.

    \b
    exportkit ops build my_ops
    exportkit ops build my_ops --watch
    """  # noqa: D301 (click wants the control character, to keep the lines below it)
    from exportkit.scaffold.watch import changes

    if not watch:
        _build(folder, with_symbols, as_json)
        return
    if as_json:
        raise UsageError("--watch prints a text after each build, and --json one document", hint="Leave one out.")
    _build_and_go_on(folder, with_symbols)
    for changed in changes(folder):
        click.echo(f"\nchanged: {printable(', '.join(changed))}")
        _build_and_go_on(folder, with_symbols)


def _build_and_go_on(folder: Path, with_symbols: bool) -> None:
    try:
        _build(folder, with_symbols, as_json=False)
    except ExportkitError as error:
        for line in str(error).splitlines():
            click.echo(printable(line), err=True)
    click.echo("waits for changes; Ctrl-C ends", err=True)


def _build(folder: Path, with_symbols: bool, as_json: bool) -> None:
    from exportkit.scaffold.build_library import build_folder

    with progress() as step:
        step(f"building {folder.resolve().name}")
        libraries = build_folder(folder, debug=with_symbols)
    if as_json:
        print_json({"libraries": [_document(library) for library in libraries]})
        return
    if not libraries:
        click.echo(f"{folder}: built, but no library registers an operator")
    for library in libraries:
        kernels = ", ".join(kind.upper() if kind != "any" else "any device" for kind in library.registrations.kernels)
        click.echo(f"{printable(str(library.path))}  kernels for {kernels or 'no device'}")
        print_table((schema,) for _, schema in sorted(library.registrations.defines.items()))


def _document(library: BuiltLibrary) -> dict[str, object]:
    found = library.registrations
    return {"path": library.path, "operators": found.defines, "kernels": found.kernels}
