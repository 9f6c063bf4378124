"""Prints what keeps a model from being exported."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from exportkit.cli.output import print_json, printable, printable_lines
from exportkit.errors import ExportError

if TYPE_CHECKING:
    from exportkit.export.trace.draft import Draft


def print_draft(draft: Draft, as_json: bool) -> int:
    """Prints a draft and returns the exit code: 0 if nothing keeps the model from being exported."""
    if as_json:
        findings = [asdict(finding) for finding in draft.findings]
        print_json({"findings": findings, "changes": [asdict(change) for change in draft.changes]})
    else:
        _print(draft)
    return ExportError.exit_code if draft.findings else 0


def _print(draft: Draft) -> None:
    if not draft.findings:
        click.echo("Nothing keeps the model from being exported.")
    for number, finding in enumerate(draft.findings, 1):
        first, *others = finding.message.split("\n")
        click.echo(f"{number}. {printable(first)}")
        for line in others:
            click.echo(printable_lines(line.strip(), "     "))
        for name, description in finding.variables.items():
            click.echo(f"     {printable(name)}: {printable(description)}")
        if finding.occurrences > 1:
            click.echo(f"     {finding.occurrences} times")
        if finding.hint:
            click.echo(printable_lines(finding.hint, "   "))
