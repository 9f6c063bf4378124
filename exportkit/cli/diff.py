"""`exportkit diff`."""

from __future__ import annotations

from exportkit.cli.app import command as exportkit_command


@exportkit_command("diff", short_help="Compare two packages.")
def command(as_json: bool) -> None:
    """Compare two packages."""
    raise NotImplementedError
