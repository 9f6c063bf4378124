"""`exportkit diff`."""

from __future__ import annotations

import dataclasses
import re
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from exportkit.cli.app import command as exportkit_command
from exportkit.cli.output import print_json, print_table, printable, printable_lines, progress
from exportkit.cli.shared_options import EXISTING_FILE, device_option, op_library_option, timeout_option
from exportkit.progress import bytes_text
from exportkit.reference_model import ReferenceModel
from exportkit.verify.options import VerifyOptions

if TYPE_CHECKING:
    from exportkit.diff.answers import AnswerComparison
    from exportkit.diff.difference import Comparison, Difference

_LONGEST = 60  # characters of a value; --json has all of them
_EFFECTS = {"answer": "changes answers", "load": "changes what loads it", None: ""}


@exportkit_command("diff", short_help="Compare two packages.")
@click.argument("a", type=EXISTING_FILE, metavar="A")
@click.argument("b", type=EXISTING_FILE, metavar="B")
@click.option("--run", is_flag=True, help="Run both on the recorded cases of A and of B, and compare the answers.")
@device_option("With --run: run the best target of this device.", default=VerifyOptions().device)
@op_library_option(
    "With --run: an operator library that A or B calls but does not contain, or a Python module that loads some. "
    "Repeatable."
)
@timeout_option
def command(a: Path, b: Path, run: bool, op_libraries: tuple[Path | str, ...], as_json: bool, **options: Any) -> None:
    """Compare two artifacts or packages, or ONNX models, part by part.

    Every digest is checked. Without --run, nothing of A and B is executed or imported. Weights are compared by the
    names of the model's state.

    With --run, each runs in its process. The answers to a recorded case are the same if each of both is right
    by the rule of `exportkit verify` where the other one's answer is expected.

    As with diff(1), the exit code is 0 if both are the same, and 1 if they differ in anything that changes an answer,
    or where and how they load. Names, versions, sizes, recorded cases, provenance and signatures are shown, but do not
    count.

    \b
    exportkit diff old.pt2 new.pt2
    exportkit diff old.pt2 new.pt2 --run --json
    """  # noqa: D301 (click wants the control character, to keep the lines below it)
    from exportkit.diff.comparing import compare_artifacts

    answers: AnswerComparison | None = None
    with progress() as step:
        comparison = compare_artifacts(a, b, progress=step)
        if run:
            from exportkit.diff.answers import compare_answers

            answers = compare_answers(
                a, b, VerifyOptions(eager=ReferenceModel(op_libraries=op_libraries), **options), progress=step
            )
    same = comparison.same and (answers is None or answers.same)
    if as_json:
        document = {"same": same, **dataclasses.asdict(comparison)}
        print_json(document | {"answers": answers.document() if answers is not None else None})
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
    note = f" ({difference.note})" if difference.note else ""
    return difference.what, values + note, _EFFECTS[difference.effect]


def _short(value: str) -> str:
    if re.fullmatch("[0-9a-f]{64}", value):
        return f"{value[:16]}..."
    return value if len(value) <= _LONGEST else f"{value[: _LONGEST - 3]}..."


def _print_answers(answers: AnswerComparison) -> None:
    click.echo("Answers")
    first_lines = [check.message.partition("\n")[0] if check.same else "" for check in answers.checks]
    results = [(c.case, "same" if c.same else "DIFFERENT", line) for c, line in zip(answers.checks, first_lines)]
    print_table([row if row[2] else row[:2] for row in results])
    for check in answers.checks:
        if not check.same:
            click.echo(f"\n  {printable(check.case)}:")
            click.echo(printable_lines(check.message, "    "))
    for note in answers.notes:
        click.echo(f"  not run: {printable(note)}")
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
