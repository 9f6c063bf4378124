"""`exportkit diff`."""

from __future__ import annotations

import dataclasses
import re
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import click

from exportkit.cli.app import command as exportkit_command
from exportkit.cli.output import print_json, print_table, printable, printable_lines, progress
from exportkit.cli.shared_options import EXISTING_FILE, device_option, flag
from exportkit.progress import bytes_text

if TYPE_CHECKING:
    from exportkit.inspect.answers import AnswerComparison
    from exportkit.inspect.comparing import Comparison, Difference

_LONGEST = 60  # characters of a value; --json has all of them
_EFFECTS = {"answer": "changes answers", "load": "changes what loads it", None: ""}


@exportkit_command("diff", short_help="Compare two packages.")
@click.argument("a", type=EXISTING_FILE, metavar="A")
@click.argument("b", type=EXISTING_FILE, metavar="B")
@flag("--run", "Run both on the recorded cases of A and of B, and compare the answers.")
@device_option("With --run: run the best target of this device.", default="auto")
def command(a: Path, b: Path, run: bool, device: str, as_json: bool) -> None:
    """Compare two artifacts or packages, or ONNX models, part by part.

    Every digest is checked. Without --run, nothing of A and B is executed or imported. Weights are compared by the
    names of the model's state, and programs by how often they call each operator.

    With --run, two packages run, each in its process. The answers to a recorded case are the same if each of both is
    right by the rule of `exportkit verify` where the other one's answer is expected.

    As with diff(1), the exit code is 0 if both are the same, and 1 if they differ in anything that changes an answer,
    or where and how they load. Names, versions, tolerances, recorded cases, source and provenance are shown, but do
    not count.

    \b
    exportkit diff old.pt2 new.pt2
    exportkit diff old.pt2 new.pt2 --run --json
    """  # noqa: D301 (click wants the control character, to keep the lines below it)
    from exportkit.inspect.comparing import compare_artifacts

    answers: AnswerComparison | None = None
    with progress() as step:
        comparison = compare_artifacts(a, b, progress=step)
        if run:
            from exportkit.inspect.answers import compare_answers

            answers = compare_answers(a, b, device, progress=step)
    same = comparison.same and (answers is None or answers.same)
    if as_json:
        found = None if answers is None else {"same": answers.same, **dataclasses.asdict(answers)}
        print_json({"same": same, **dataclasses.asdict(comparison), "answers": found})
    else:
        _print(comparison)
        if answers is not None:
            _print_answers(answers)
        click.echo(_summary(comparison, answers, same))
    if not same:
        raise click.exceptions.Exit(1)


def _print(comparison: Comparison) -> None:
    sides = [("A", comparison.a), ("B", comparison.b)]
    print_table([(n, s.path, f"{s.name} {s.version}", bytes_text(s.size), s.sha256[:16]) for n, s in sides], indent=0)
    for part, found in groupby(comparison.differences, key=lambda difference: difference.part):
        click.echo(f"\n{part.capitalize()}")
        print_table([_row(difference) for difference in found])
    if comparison.notes:
        click.echo("")
    for note in comparison.notes:
        click.echo(f"not compared: {printable(note)}")
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


def _print_answers(answers: AnswerComparison) -> None:
    click.echo("Answers")
    print_table(
        [(c.case, "same", c.message.partition("\n")[0]) if c.same else (c.case, "DIFFERENT") for c in answers.checks]
    )
    for check in answers.checks:
        if not check.same:
            click.echo(f"\n  {printable(check.case)}:")
            click.echo(printable_lines(check.message, "    "))
    click.echo("")


def _summary(comparison: Comparison, answers: AnswerComparison | None, same: bool) -> str:
    counting = sum(difference.effect is not None for difference in comparison.differences)
    found = [
        f"differences that change an answer or a load: {counting}",
        f"others: {len(comparison.differences) - counting}",
    ]
    if answers is not None:
        found.append(f"answers that differ: {sum(not check.same for check in answers.checks)} of {len(answers.checks)}")
    return f"{'same' if same else 'DIFFERENT'} ({', '.join(found)})"
