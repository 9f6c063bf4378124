"""`exportkit ops check`."""

from __future__ import annotations

from exportkit.cli.app import command as exportkit_command


@exportkit_command("check", short_help="Hold a library's operators to the operator contract.")
def command(as_json: bool) -> None:
    """Hold a library's operators to the operator contract."""
    raise NotImplementedError
