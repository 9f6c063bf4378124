"""`exportkit cache`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click
from msgspec.structs import asdict

from exportkit.cli.app import command as exportkit_command
from exportkit.cli.app import command_group
from exportkit.cli.output import print_json, print_table
from exportkit.cli.shared_options import byte_size, duration
from exportkit.progress import bytes_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from exportkit.runtime.cache.prune import Item


@exportkit_command("info", short_help="Show what the cache holds.")
def info(as_json: bool) -> None:
    """Show where the cache is, what it holds, and which entries are in use.

    The least recently used entries come first; `prune` removes them first.
    """
    from exportkit.runtime.cache import cache_directory
    from exportkit.runtime.cache.prune import cache_items

    items = cache_items()
    total = sum(item.size for item in items)
    if as_json:
        print_json({"directory": cache_directory(), "size": total, "items": [*map(asdict, items)]})
        return
    click.echo(f"{cache_directory()}: {bytes_text(total)}")
    print_table(_rows(items))


@exportkit_command("prune", short_help="Remove entries from the cache.")
@click.option(
    "--max-size", "max_bytes", callback=byte_size, metavar="SIZE", help="Keep at most this much, such as 2GB."
)
@click.option(
    "--older-than",
    "unused_for",
    callback=duration,
    metavar="TIME",
    help="Remove entries that were unused for this long, such as 30d or 12h.",
)
@click.option("--all", "everything", is_flag=True, help="Remove all entries that no process uses.")
def prune(as_json: bool, **limits: Any) -> None:
    """Remove the leftovers of killed processes, and the entries that exceed the limits.

    The least recently used entries go first. Entries that a running process uses stay. The next load of a package
    unpacks and verifies removed entries again.

    \b
    exportkit cache prune                                   only leftovers of killed processes
    exportkit cache prune --max-size 2GB --older-than 30d
    """  # noqa: D301 (click wants the control character, to keep the lines below it)
    from exportkit.runtime.cache.prune import prune as prune_cache

    pruned = prune_cache(**limits)
    freed, left = (sum(item.size for item in items) for items in (pruned.removed, pruned.kept))
    if as_json:
        parts = {"removed": [*map(asdict, pruned.removed)], "kept": [*map(asdict, pruned.kept)]}
        print_json({"freed": freed, "left": left, **parts})
        return
    print_table(_rows(pruned.removed))
    click.echo(f"removed {len(pruned.removed)}, {bytes_text(freed)}; {bytes_text(left)} left")


@command_group("cache", commands=[info, prune], short_help="Show or prune the cache of loaded packages.")
def command() -> None:
    """Show or prune the cache of loaded packages: unpacked operator libraries and compiled code, and verified digests.

    The cache is in $EXPORTKIT_CACHE, or in exportkit under $XDG_CACHE_HOME or ~/.cache. You may delete it at any time.
    """


def _ago(seconds: float) -> str:
    """Returns such as `5 minutes ago`."""
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{int(seconds // length)} {unit} ago"
    return "just now"


def _rows(items: Sequence[Item]) -> list[tuple[str, ...]]:
    now = time.time()
    return [
        (
            item.kind,
            bytes_text(item.size),
            "in use" if item.in_use else f"used {_ago(now - item.used)}",
            str(item.path),
        )
        for item in items
    ]
