"""`exportkit ops new`."""

from __future__ import annotations

from exportkit.cli.app import command as exportkit_command


@exportkit_command("new", short_help="Write a new operator.")
def command(as_json: bool) -> None:
    """Write a new operator."""
    raise NotImplementedError
