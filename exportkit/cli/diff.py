"""`exportkit diff`."""

from __future__ import annotations

import dataclasses
import re
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import click

from exportkit.cli.app import command as exportkit_command
from exportkit.cli.output import print_json, print_table, progress
from exportkit.cli.shared_options import EXISTING_FILE
from exportkit.progress import bytes_text

if TYPE_CHECKING:
    from exportkit.inspect.comparing import Comparison, Difference

_LONGEST = 60  # characters of a value; --json has all of them
_EFFECTS = {"answer": "changes answers", "load": "changes what loads it", None: ""}


@exportkit_command("diff")
@click.argument("a", type=EXISTING_FILE, metavar="A")
@click.argument("b", type=EXISTING_FILE, metavar="B")
def command(a: Path, b: Path, as_json: bool) -> None:
    """Compare two artifacts or packages, or ONNX models, part by part.

    Every digest is checked. Nothing of A and B is executed or imported. Weights are compared by the names of the
    model's state, and programs by their digests.

    As with diff(1), the exit code is 0 if both are the same, and 1 if they differ in anything that changes an answer,
    or where and how they load. Names, versions, tolerances, recorded cases, source and provenance are shown, but do
    not count.

    \b
    exportkit diff old.pt2 new.pt2
    exportkit diff old.pt2 new.pt2 --json
    """  # noqa: D301 (click wants the control character, to keep the lines below it)
    from exportkit.inspect.comparing import compare_artifacts

    with progress() as step:
        comparison = compare_artifacts(a, b, progress=step)
    if as_json:
        print_json({"same": comparison.same, **dataclasses.asdict(comparison)})
    else:
        _print(comparison)
        click.echo(_summary(comparison))
    if not comparison.same:
        raise click.exceptions.Exit(1)


def _print(comparison: Comparison) -> None:
    sides = [("A", comparison.a), ("B", comparison.b)]
    print_table([(n, s.path, f"{s.name} {s.version}", bytes_text(s.size), s.sha256[:16]) for n, s in sides], indent=0)
    for part, found in groupby(comparison.differences, key=lambda difference: difference.part):
        click.echo(f"\n{part.capitalize()}")
        print_table([_row(difference) for difference in found])
    click.echo("")


def _row(difference: Difference) -> tuple[str, ...]:
    one, other = difference.a, difference.b
    if difference.max_abs is not None:
        values = f"greatest absolute difference {difference.max_abs:.3g}"
    elif one is not None and other is not None:
        values = f"{_short(one)} -> {_short(other)}"
    else:
        values = f"only in {'B' if one is None else 'A'}: {_short(one or other or '')}"
    return difference.what, values, _EFFECTS[difference.effect]


def _short(value: str) -> str:
    if re.fullmatch("[0-9a-f]{64}", value):
        return f"{value[:16]}..."
    return value if len(value) <= _LONGEST else f"{value[: _LONGEST - 3]}..."


def _summary(comparison: Comparison) -> str:
    counting = sum(difference.effect is not None for difference in comparison.differences)
    others = len(comparison.differences) - counting
    found = f"differences that change an answer or a load: {counting}, others: {others}"
    return f"{'same' if comparison.same else 'DIFFERENT'} ({found})"
