"""`exportkit ops list`."""

from __future__ import annotations

from exportkit.cli.app import command as exportkit_command


@exportkit_command("list", short_help="List the operators of a library.")
def command(as_json: bool) -> None:
    """List the operators of a library."""
    raise NotImplementedError
