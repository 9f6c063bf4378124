"""`exportkit doctor`."""

from __future__ import annotations

from dataclasses import asdict

import click

from exportkit.cli.app import command as exportkit_command
from exportkit.cli.output import print_json, print_table, progress


@exportkit_command("doctor", short_help="Show what this machine can do, and what is missing.")
def command(as_json: bool) -> None:
    """Show whether this machine can export, compile and load, and what is missing.

    The exit code is 4 if it cannot load a CPU package, export, or compile for the CPU. A missing GPU is not a failure.
    """
    from exportkit.doctor import BASIC, diagnose

    with progress() as step:
        machine = diagnose(step)
    able = all(capability.ok for capability in machine.capabilities if capability.name in BASIC)
    if as_json:
        print_json({"ok": able, **asdict(machine)})
    else:
        click.echo("This machine:")
        print_table([("ok" if f.ok else "--", f.name, f.detail) for f in machine.findings])
        click.echo("It can:")
        reasons = [("yes" if a.ok else "no", a.name, f"missing: {', '.join(a.missing)}") for a in machine.capabilities]
        print_table([row if row[0] == "no" else row[:2] for row in reasons])
        hints = [f"{f.name}: {f.hint}" for f in machine.findings if f.hint and not f.ok]
        if hints:
            click.echo("What to do:")
            print_table([(hint,) for hint in hints])
    if not able:
        raise click.exceptions.Exit(4)
