"""Writes docs/cli.md from the commands: `python -m exportkit.cli.reference`. A test fails when it is stale."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from exportkit.cli.frame import group
from exportkit.verify.outcomes import EXIT_CODES

REFERENCE = Path(__file__).parents[2] / "docs" / "cli.md"

_WIDTH: dict[str, Any] = {"terminal_width": 110, "max_content_width": 110}

_HEAD = """\
# Command line

Written by `make docs` from the commands' own help; do not edit.

Every command takes `--json`, which prints one JSON document on stdout and nothing else there; progress and messages go
to stderr. A failure is `{"error": {"kind", "message", "hint", "exit_code"}}`. Numbers that JSON has no word for are the
strings `"inf"`, `"-inf"` and `"nan"`. `--debug` shows the traceback of an error.
"""

_REPORT = """\
## The document of `verify --json`

`package --json` has it under `verification`.

| key | value |
| --- | --- |
| `ok`, `exit_code` | whether no check failed; the code of the first one that did |
| `artifact`, `torch` | the file; the version of the torch that ran it, null where nothing was loaded |
| `targets` | each compiled target, or the exported program: `name`, `device`, `load_seconds`, `left_out`. `left_out` is why it was not run here, null where it was |
| `checks` | in the order they were made: `target` (null for those of the whole package), `against` (`package`, `cases`, `eager`), `label`, `sizes`, `seconds`, `verdict`. A verdict has `kind`, `exit_code` (0: no failure), `message`, and what its kind is about |
| `skipped` | sizes that were not compared with eager, and why |
"""  # noqa: E501 (a table's row is one line)


def reference() -> str:
    """The text of docs/cli.md."""
    # Made as a run makes them: a bare click.Context has not the group's settings (-h).
    root = group.make_context("exportkit", [], resilient_parsing=True, **_WIDTH)
    parts = [_HEAD, "## Exit codes\n", "| code | meaning |", "| --- | --- |"]
    parts += [f"| {code} | {meaning} |" for code, meaning in EXIT_CODES.items()]
    parts += ["", "The first check that fails decides.\n", _REPORT]
    for name in group.list_commands(root):
        command = group.get_command(root, name)
        assert command is not None
        parts += _described(name, command, root)
    return "\n".join(parts)


def _described(name: str, command: click.Command, parent: click.Context) -> list[str]:
    """The help of a command, and of its own commands."""
    context = command.make_context(name, [], parent=parent, resilient_parsing=True, **_WIDTH)
    parts = [f"## {context.command_path}\n", "```", command.get_help(context), "```\n"]
    if isinstance(command, click.Group):
        for own_name, own in command.commands.items():
            parts += _described(own_name, own, context)
    return parts


if __name__ == "__main__":
    REFERENCE.write_text(reference())
    click.echo(f"wrote {REFERENCE}")
