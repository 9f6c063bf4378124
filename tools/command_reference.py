"""Writes docs/cli.md from the commands' own help: `python -m tools.command_reference`.

The page in docs/ has the commands and the exit codes. The site and the man page have every option too. Run it after a
command or its help changed. A test fails when docs/cli.md is stale.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
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

Written by `make docs` from the commands' own help. `exportkit COMMAND --help` and `man exportkit` have every option.

With `--json` a command prints one JSON document on stdout and nothing else; progress and messages go to stderr. A
failure is `{"error": {"kind", "message", "hint", "exit_code"}}`. Infinities and NaN are the strings `"inf"`, `"-inf"`
and `"nan"`. `--debug` shows the traceback of an error.

`eval "$(_EXPORTKIT_COMPLETE=bash_source exportkit)"` in `~/.bashrc` completes commands, options and file names; write
`zsh_source` for zsh, and `_EXPORTKIT_COMPLETE=fish_source exportkit | source` for fish.
"""

_REPORT = """\
## The document of `verify --json`

`package --json` has the same document under `verification`.

| key | value |
| --- | --- |
| `ok`, `exit_code` | Whether every check passed; the exit code of the first one that failed. |
| `compared_with_eager` | Whether any call was compared with the running eager model. |
| `artifact`, `torch` | The file; the torch that ran it, or null. |
| `targets` | For each compiled target, or for the exported program: `name`, `device`, `load_seconds`, and `left_out`, why it was not run here, or null. |
| `checks` | In their order: `target` (null for the whole package), `against` (`package`, `cases`, `eager`), `label`, `sizes`, `seconds`, `verdict`. A verdict has `kind`, `exit_code` (0 if the check passed), `message`, and the values of its kind. |
| `skipped` | Sizes that were not compared with eager, and why. |
"""  # noqa: E501 (a table's row is one line)


def page() -> str:
    """Returns the text of docs/cli.md."""
    lines = ["## Commands\n", "| command | does |", "| --- | --- |"]
    lines += [f"| `{context.command_path}` | {command.get_short_help_str(200)} |" for command, context in _commands()]
    return "\n".join([_HEAD, *lines, "", *_exit_codes(), _REPORT])


def reference() -> str:
    """Returns the page of the site and the man page, with the help of every command."""
    parts = [_HEAD, *_exit_codes(), _REPORT]
    for command, context in _commands(groups=True):
        text = _OF_EVERY_COMMAND.sub("", command.get_help(context) + "\n")
        text = re.sub(r"\nOptions:\n(?=\n|\Z)", "", text)
        parts += [f"## {context.command_path}\n", "```", text.rstrip(), "```\n"]
    return "\n".join(parts)


def _exit_codes() -> list[str]:
    rows = [f"| {code} | {meaning} |" for code, meaning in EXIT_CODES.items()]
    last = "The first check that fails decides the exit code; it is 21 only where none fails.\n"
    return ["## Exit codes\n", "| code | meaning |", "| --- | --- |", *rows, "", last]


def _commands(*, groups: bool = False) -> Iterator[tuple[click.Command, click.Context]]:
    """Yields every command with its context, in the order of the help; with `groups` those of commands, too."""
    # make_context gives the settings of a real run; a bare click.Context would miss those of the group, such as -h.
    todo: list[tuple[click.Command, click.Context]] = [
        (group, group.make_context("exportkit", [], resilient_parsing=True, **_WIDTH))
    ]
    while todo:
        command, context = todo.pop(0)
        if not isinstance(command, click.Group):
            yield command, context
            continue
        if groups and context.parent:
            yield command, context
        below = [(name, command.get_command(context, name)) for name in command.list_commands(context)]
        todo[:0] = [
            (one, one.make_context(name, [], parent=context, resilient_parsing=True, **_WIDTH))
            for name, one in below
            if one is not None
        ]


if __name__ == "__main__":
    DOCUMENT.write_text(page())
