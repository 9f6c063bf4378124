"""`exportkit ops build`."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from exportkit.cli.app import command as exportkit_command
from exportkit.cli.output import print_json, printable, progress
from exportkit.cli.shared_options import flag
from exportkit.errors import ExportkitError, UsageError
from exportkit.progress import silent

if TYPE_CHECKING:
    from exportkit.operators.contract.findings import Finding
    from exportkit.operators.scaffold.build_library import BuiltLibrary


@exportkit_command("build", short_help="Build operators, once or at every change.")
@click.argument(
    "folder", type=click.Path(exists=True, file_okay=False, path_type=Path), default=Path("."), metavar="[DIR]"
)
@flag("--watch", "Build again whenever a source file changes, until Ctrl-C.")
@flag("--check", "Then hold the operators to their SPECs, in two dtypes.")
@flag("--with-symbols", "Build with symbols for a debugger, and without optimisation.")
def command(folder: Path, watch: bool, check: bool, with_symbols: bool, as_json: bool) -> None:
    """Build the operators in DIR, and say what a fresh process finds in the libraries.

    DIR has a setup.py, such as `exportkit ops new` writes, or is a checkout of exportkit. Only what changed is
    compiled. Ctrl-C ends the compilers too, and a build that was killed leaves nothing that the next one waits for.

    \b
    exportkit ops build my_ops
    exportkit ops build my_ops --watch --check
    """  # noqa: D301 (click wants the control character, to keep the lines below it)
    from exportkit.operators.scaffold.build_library import changes

    if as_json and (watch or check):
        raise UsageError(
            "--json prints one document about one build, and --watch and --check print text",
            hint="Leave one out. `exportkit ops check --json` has what --check finds.",
        )
    if not watch:
        if code := _build(folder, check, with_symbols, as_json):
            raise click.exceptions.Exit(code)
        return
    watched = changes(folder)
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            _build_and_go_on(folder, check, with_symbols)
            click.echo("waits for changes; Ctrl-C ends", err=True)
            click.echo(f"\nchanged: {printable(', '.join(next(watched)))}")


def _build_and_go_on(folder: Path, check: bool, with_symbols: bool) -> None:
    try:
        _build(folder, check, with_symbols, as_json=False)
    except ExportkitError as error:
        for line in str(error).splitlines():
            click.echo(printable(line), err=True)


def _build(folder: Path, check: bool, with_symbols: bool, as_json: bool) -> int:
    """Builds, and checks. Returns the exit code."""
    from exportkit.operators.scaffold.build_library import build_folder, check_arguments

    with progress() as step:
        step(f"building {folder.resolve().name}")
        libraries = build_folder(folder, debug=with_symbols)
    if as_json:
        print_json({"libraries": [_document(library) for library in libraries]})
        return 0
    if not libraries:
        click.echo(f"{folder}: built, but no library registers an operator")
        return 0
    for library in libraries:
        kernels = ", ".join(kind.upper() if kind != "any" else "any device" for kind in library.registrations.kernels)
        click.echo(f"{printable(str(library.path))}  kernels for {kernels or 'no device'}")
        findings = _findings(library)
        for name, schema in sorted(library.registrations.defines.items()):
            click.echo(f"  {printable(schema)}")
            for finding in findings.get(name, ()):
                click.echo(
                    f"    {finding.severity.value}: {printable(finding.message)} {printable(finding.hint or '')}"
                )
    if not check:
        return 0
    from exportkit.cli import ops_check

    code = ops_check.command.main(check_arguments(folder, libraries), "exportkit ops check", standalone_mode=False)
    return code if isinstance(code, int) else 0


def _document(library: BuiltLibrary) -> dict[str, object]:
    found = library.registrations
    findings = msgspec.to_builtins(_findings(library))
    return {"path": library.path, "operators": found.defines, "kernels": found.kernels, "findings": findings}


def _findings(library: BuiltLibrary) -> dict[str, tuple[Finding, ...]]:
    """Returns what export or the stable ABI cannot take of the schemas, by operator: what `ops list` says of them."""
    from exportkit.operators.tools.listing import list_operators
    from exportkit.operators.tools.source import OperatorSource

    if not library.registrations.defines:
        return {}
    listing = list_operators(OperatorSource("file", str(library.path)), silent)
    return {operator.name: operator.objections for operator in listing.operators if operator.objections}
