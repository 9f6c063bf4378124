"""`exportkit ops check`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
from click.core import ParameterSource

from exportkit.cli.app import command as exportkit_command
from exportkit.cli.output import print_json, print_table, printable, printable_lines, progress, with_progress
from exportkit.cli.shared_options import (
    OUTPUT_FILE,
    byte_size,
    device_option,
    op_library_option,
    repeatable,
    seed_option,
)
from exportkit.errors import HostError
from exportkit.libraries import file_sha256
from exportkit.package.atomic import check_writable, write_whole

if TYPE_CHECKING:
    from exportkit.operators.contract.findings import Finding
    from exportkit.operators.tools.checking import Checked, CheckOptions
    from exportkit.operators.tools.source import OperatorSource

_DTYPES = ("float32", "float64", "float16", "bfloat16")


@exportkit_command(
    "check",
    common=("operators", "only", "references", "calls", "inputs", "device"),
    short_help="Hold a library's operators to the operator contract.",
)
@click.argument("source", metavar="LIBRARY|MODULE")
@repeatable("--operator", "NAME", "Check only this one, or those of a pattern such as 'jagged_*'.", to="operators")
@repeatable("--only", "CHECK", "Run only this check.")
@repeatable(
    "--reference",
    "[NS::OP=]FILE.py:FUNCTION",
    "A function with the operator's parameters that computes the same with torch's operators.",
    to="references",
)
@repeatable(
    "--calls",
    "[NS::OP=]FILE.py:FUNCTION",
    "A function that yields valid calls as (args, kwargs), which are checked beside the others.",
)
@repeatable(
    "--spec",
    "MODULE:SPEC",
    "An operator's promises, an OpSpec. Default: those of the modules that LIBRARY imports.",
    to="specs",
)
@repeatable("--input", "NAME=DTYPE[SIZES]", "An example input of MODULE, such as x=float32[2,3,64,64].", to="inputs")
@op_library_option("An operator library to load first, for a MODULE or a .py file that needs one. Repeatable.")
@device_option("Where the operators run; auto: on each device of this machine that they have kernels for.", "auto")
@repeatable("--dtype", "DTYPE", "A dtype of floating tensors.", to="dtypes", default=_DTYPES)
@seed_option("Seed of what is drawn.")
@click.option(
    "--max-calls",
    "most_calls",
    type=click.IntRange(min=1, max=10_000),
    default=24,
    help="How many calls of an operator are collected. A SPEC's samples are all taken.",
)
@click.option(
    "--timeout",
    type=click.IntRange(min=1, max=86400),
    default=60,
    help="Seconds that a call may take.",
)
@click.option(
    "--candidate",
    "statement_file",
    type=OUTPUT_FILE,
    metavar="FILE.json",
    help="Judge kernels that a program wrote, those with a --reference, and write what was found as an in-toto "
    "statement.",
)
@click.option(
    "--max-memory",
    "memory",
    callback=byte_size,
    metavar="SIZE",
    help="Memory that the operators may take, such as 2GB. Default: half of what is free.",
)
def command(
    source: str,
    references: Sequence[str],
    calls: Sequence[str],
    op_libraries: Sequence[Path | str],
    statement_file: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Hold the operators of a library, or those that a model calls, to the operator contract.

    LIBRARY is what `exportkit ops list` takes. Calls are drawn from the schema by trial: a call that the kernel refuses
    is not valid. An operator for which none is found is not checked; --calls gives some. An operator with an OpSpec is
    called at its samples.

    MODULE is what `exportkit export` takes. It runs on its example inputs, and the calls of its custom operators are
    recorded.

    These calls are varied in sizes and dtypes, and the checks are made on all of them. The checks run in another
    process: a crash, a hang and exhausted memory are findings, and the other operators are still checked. A finding
    has the smallest call that shows it. The exit code is 1 if something is broken or not checked.

    Each operator is printed as soon as it is done.

    With --candidate, a kernel and its reference are in two processes. The seed is drawn after the kernel's files were
    hashed; --seed repeats a run. A kernel that asks torch's dispatcher for an operator that the reference computes with
    is broken.

    \b
    exportkit ops check build/libmy_ops.so
    exportkit ops check my_package.ops --operator scale --reference reference.py:scale
    exportkit ops check libmy_ops.so --reference my_ops::scale=reference.py:scale --candidate scale.intoto.json
    exportkit ops check my_model.py:Net --input 'x=float32[2,8]' --op-library libmy_ops.so --json
    """  # noqa: D301 (click wants the control character, to keep the lines below it)
    from exportkit.operators.tools.checking import CheckOptions, exit_code
    from exportkit.operators.tools.source import parse_source

    parsed = parse_source(source, models=True)
    if parsed.kind != "model" and options["inputs"]:
        raise click.UsageError("--input is for a model, such as my_model.py:Net.")
    lists = {name: tuple(value) for name, value in options.items() if isinstance(value, (list, tuple))}
    check_options = CheckOptions(
        **{**options, **lists},
        references=dict(of_operators("--reference", references, options["operators"])),
        calls=dict(of_operators("--calls", calls, options["operators"])),
        libraries=tuple(str(each.resolve()) if isinstance(each, Path) else each for each in op_libraries),
    )
    if statement_file is None:
        found = _checked(parsed, check_options, as_json)
    else:
        found = _judged(parsed, check_options, statement_file, as_json)
    code = exit_code(found)
    if as_json:
        print_json({"ok": code == 0, "source": source, "operators": msgspec.to_builtins(found)})
    else:
        _print_all(source, found)
    if code:
        raise click.exceptions.Exit(code)


def _checked(source: OperatorSource, options: CheckOptions, as_json: bool) -> list[Checked]:
    from exportkit.operators.tools.checking import check_source

    found = []
    for checked in with_progress(lambda step: check_source(source, options, step)):
        found.append(checked)
        if not as_json:
            _print_one(checked)
    return found


def _judged(source: OperatorSource, options: CheckOptions, statement_file: Path, as_json: bool) -> list[Checked]:
    """Checks and judges the operators that have a reference, and writes the statement."""
    from exportkit.operators.tools import candidate

    if source.kind == "model" or not options.references:
        raise click.UsageError("--candidate needs a library, and --reference for each operator to judge.")
    functions = [*options.references.values(), *options.calls.values()]
    read = [source.text, *options.libraries, *(function.rpartition(":")[0] for function in functions)]
    check_writable(statement_file, read=read)
    given = seed_given()
    with progress() as step:
        step("hashing the kernel's files")
        files = [Path(file) for file in candidate.loaded(source, options).files]
        digests = {file.name: file_sha256(file) for file in files}
    seed = options.seed if given else candidate.drawn_seed()
    options = msgspec.structs.replace(options, seed=seed, operators=tuple(options.references))
    found = _checked(source, options, as_json)
    with progress() as step:
        found, trials = candidate.judged(source, options, found, step)
    if digests != {file.name: file_sha256(file) for file in files}:
        hint = "Build them, and then run this again."
        raise HostError("the kernel's files changed while they were judged", hint=hint)
    written = candidate.statement(digests, options, found, trials, drawn=not given)
    write_whole(statement_file, json.dumps(written, indent=2).encode() + b"\n")
    if not as_json:
        for operator, trial in trials.items():
            click.echo(f"{printable(operator)}: judged, {trial.compared} of {trial.calls} answers compared")
            for finding in trial.findings:
                _print_finding(finding)
    return found


def seed_given() -> bool:
    """Whether the user gave --seed."""
    return click.get_current_context().get_parameter_source("seed") is not ParameterSource.DEFAULT


def of_operators(option: str, texts: Sequence[str], operators: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Parses "ns::op=FILE.py:function", where the operator may be left out beside a single --operator."""
    for text in texts:
        operator, equals, function = text.rpartition("=")
        if not equals and len(operators) != 1:
            raise click.UsageError(f"{option} {text}: say of which operator: {option} NS::OP={text}.")
        if ":" not in function:
            raise click.UsageError(f"{option} {text}: name a function, such as FILE.py:function.")
        yield operator or operators[0], function


def _print_one(checked: Checked) -> None:
    report = checked.report
    fine = not report.findings and not checked.not_checked
    click.echo(f"{printable(report.operator)}: {'ok' if fine else printable(report.schema)}")
    for finding in report.findings:
        _print_finding(finding)
    if checked.not_checked:
        click.echo(f"  not checked: {printable(checked.not_checked)}")
        if checked.hint:
            click.echo(f"    {printable(checked.hint)}")
    if checked.never_tried:
        click.echo(f"  never tried: {printable('; '.join(checked.never_tried))}")
    if not fine:
        click.echo()


def _print_all(source: str, found: Sequence[Checked]) -> None:
    click.echo(f"{printable(source)}:")
    print_table([("operator", "calls", "made", "passed", "result"), *map(_row, found)])
    broken = sum(checked.broken for checked in found)
    unchecked = sum(checked.not_checked is not None and not checked.broken for checked in found)
    count = f"{len(found)} operator{'s' * (len(found) != 1)}"
    text = f"{count}: {broken} broken, {unchecked} not checked" if broken or unchecked else f"ok: {count}"
    partly = sum(bool(checked.never_tried) for checked in found)
    click.echo(f"{text}, {partly} not tried in full" if partly else text)


def _print_finding(finding: Finding) -> None:
    click.echo(f"  {finding.severity.value}  {printable(finding.check)}: {printable(finding.message)}")
    if finding.call:
        click.echo(printable_lines(finding.call, "    >>> "))
    if finding.hint:
        click.echo(f"    {printable(finding.hint)}")


def _row(checked: Checked) -> tuple[str, ...]:
    report = checked.report
    broken = ", ".join(finding.check for finding in report.findings if finding.severity.value == "broken")
    if broken:
        result = f"BROKEN: {broken}"
    elif checked.not_checked:
        result = "not checked"
    elif report.findings:
        result = f"doubtful: {', '.join(finding.check for finding in report.findings)}"
    else:
        result = "ok"
    return report.operator, checked.origin, str(report.calls), str(len(report.passed)), result
