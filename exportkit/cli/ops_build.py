"""`exportkit ops build`."""

from __future__ import annotations

from exportkit.cli.app import command as exportkit_command


@exportkit_command("build", short_help="Build an operator library, again and again.")
def command(as_json: bool) -> None:
    """Build an operator library, again and again."""
    raise NotImplementedError
