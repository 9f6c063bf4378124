"""Writes docs/cli.md from the commands' own help: `python -m tools.command_reference`.

Run it after a command, an option or its help changed. A test fails when docs/cli.md is stale.
"""

from __future__ import annotations

import re
from typing import Any

import click

from exportkit.cli.app import group
from exportkit.errors import EXIT_CODES
from tools.generated import DOCS

DOCUMENT = DOCS / "cli.md"

_OF_EVERY_COMMAND = re.compile(r"^  (--json|--debug|-h, --help) .*\n", re.MULTILINE)

_WIDTH: dict[str, Any] = {"terminal_width": 110, "max_content_width": 110}

_HEAD = """\
# Command line

Written by `make docs` from the commands' own help. Do not edit it.

Every command takes `--json`, `--debug` and `--help`. With `--json` it prints one JSON document on stdout and nothing else
there; progress and messages go to stderr. A failure is `{"error": {"kind", "message", "hint", "exit_code"}}`. JSON has no
infinity and no NaN: such numbers are the strings `"inf"`, `"-inf"` and `"nan"`. `--debug` shows the traceback of an error.

`eval "$(_EXPORTKIT_COMPLETE=bash_source exportkit)"` in `~/.bashrc` completes commands, options and file names; write
`zsh_source` for zsh, and `_EXPORTKIT_COMPLETE=fish_source exportkit | source` for fish.
"""

_REPORT = """\
## The document of `verify --json`

`package --json` has the same document under `verification`.

| key | value |
| --- | --- |
| `ok`, `exit_code` | Whether every check passed; the exit code of the first one that failed. |
| `artifact`, `torch` | The file; the version of the torch that ran it, or null if nothing was loaded. |
| `targets` | One entry for each compiled target, or for the exported program: `name`, `device`, `load_seconds`, `left_out`. `left_out` says why the target was not run on this machine; it is null if the target was run. |
| `checks` | In the order they were made: `target` (null for a check of the whole package), `against` (`package`, `cases`, `eager`), `label`, `sizes`, `seconds`, `verdict`. A verdict has `kind`, `exit_code` (0 if the check passed), `message`, and the values that belong to its kind. |
| `skipped` | Sizes that were not compared with eager, and why. |
"""  # noqa: E501 (a table's row is one line)


def reference() -> str:
    """Returns the text of docs/cli.md."""
    # make_context gives the settings of a real run; a bare click.Context would miss those of the group, such as -h.
    root = group.make_context("exportkit", [], resilient_parsing=True, **_WIDTH)
    parts = [_HEAD, "## Exit codes\n", "| code | meaning |", "| --- | --- |"]
    parts += [f"| {code} | {meaning} |" for code, meaning in EXIT_CODES.items()]
    parts += ["", "The first check that fails decides the exit code.\n", _REPORT]
    return "\n".join(parts + _subcommands(group, root))


def _described(name: str, command: click.Command, parent: click.Context) -> list[str]:
    """Returns the help of a command and of its subcommands."""
    context = command.make_context(name, [], parent=parent, resilient_parsing=True, **_WIDTH)
    text = _OF_EVERY_COMMAND.sub("", command.get_help(context) + "\n")
    text = re.sub(r"\nOptions:\n(?=\n|\Z)", "", text)
    parts = [f"## {context.command_path}\n", "```", text.rstrip(), "```\n"]
    if isinstance(command, click.Group):
        parts += _subcommands(command, context)
    return parts


def _subcommands(group: click.Group, context: click.Context) -> list[str]:
    """Returns the help of all commands of a group."""
    parts: list[str] = []
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        parts += _described(name, command, context)
    return parts


if __name__ == "__main__":
    DOCUMENT.write_text(reference())
