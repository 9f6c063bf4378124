"""`exportkit repack`."""

from __future__ import annotations

from exportkit.cli.app import command as exportkit_command


@exportkit_command("repack", short_help="Replace a package's weights or libraries.")
def command(as_json: bool) -> None:
    """Replace a package's weights or libraries."""
    raise NotImplementedError
