"""`exportkit ops list`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
import msgspec

from exportkit.cli.app import command as exportkit_command
from exportkit.cli.output import print_json, print_table, printable, progress
from exportkit.package.elf import demangled
from exportkit.support import OLDEST_TORCH

if TYPE_CHECKING:
    from exportkit.operators.tools.listing import ListedFile, ListedOperator, Listing

_SHOWN_SYMBOLS = 3


@exportkit_command("list", short_help="List the operators of a library.")
@click.argument("library")
def command(library: str, as_json: bool) -> None:
    """List the operators that LIBRARY registers, and what it needs of torch.

    LIBRARY is a shared library, a Python package that loads one (`my_package.ops`), its folder, or a .py file. Of a
    kernel of the Hugging Face hub, give the folder build/<variant>. Another process loads it. Symbols are read from the
    file.

    A symbol beyond the stable ABI binds a library to newer versions of torch, and one of torch's C++ to a single minor
    version.

    \b
    exportkit ops list build/libmy_ops.so
    exportkit ops list my_package.ops --json
    """  # noqa: D301 (click wants the control character, to keep the lines below it)
    from exportkit.operators.tools.listing import list_operators
    from exportkit.operators.tools.source import parse_source

    source = parse_source(library, models=False)
    with progress() as step:
        listing = list_operators(source, step)
    if as_json:
        print_json(msgspec.to_builtins(listing))
    else:
        _print(listing)


def _print(listing: Listing) -> None:
    count = len(listing.operators)
    click.echo(f"{printable(listing.source)}: {count} operator{'s' * (count != 1)}")
    heading = ("operator", "kernels", "fake", "gradient", "autocast")
    print_table([heading, *map(_row, listing.operators)])
    click.echo("Schemas:")
    print_table([(operator.schema,) for operator in listing.operators])
    if objections := [(each, operator) for operator in listing.operators for each in operator.objections]:
        click.echo("The schemas say what others cannot take:")
        for objection, operator in objections:
            print_table([(f"{operator.name}: {objection.message}",)])
            if objection.hint:
                print_table([(objection.hint,)], indent=4)
    if listing.files:
        click.echo("Libraries:")
        for file in listing.files:
            print_table([(file.path,)])
            print_table(_file_rows(file), indent=4)


def _row(operator: ListedOperator) -> tuple[str, ...]:
    kernels = ", ".join(operator.devices) or "none"
    return (
        operator.name,
        f"{kernels} (Python)" if operator.in_python else kernels,
        operator.fake or "none",
        operator.gradient or "none",
        ", ".join(operator.autocast) or "none",
    )


def _file_rows(file: ListedFile) -> list[tuple[str, ...]]:
    if file.cpp:
        torch = "the minor version that it was built with (torch's C++)"
    elif file.needs_torch is not None:
        torch = f"{file.needs_torch} or newer (stable ABI)"
    else:
        torch = f"newer than {OLDEST_TORCH} (stable ABI)"
    rows: list[tuple[str, ...]] = [("torch", torch)]
    if file.beyond:
        more = len(file.beyond) - _SHOWN_SYMBOLS
        shown = ", ".join(map(demangled, file.beyond[:_SHOWN_SYMBOLS])) + (f" and {more} more" if more > 0 else "")
        rows.append(("beyond the stable ABI", f"{len(file.beyond)}: {shown}"))
    if file.needs:
        rows.append(("the host", ", ".join(file.needs)))
    return rows
