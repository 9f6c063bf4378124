"""`exportkit cache`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click
from msgspec.structs import asdict

from exportkit.cli.app import command as exportkit_command
from exportkit.cli.app import command_group
from exportkit.cli.output import print_json, print_table, size_text
from exportkit.cli.shared_options import byte_size, duration

if TYPE_CHECKING:
    from collections.abc import Sequence

    from exportkit.runtime.cache.prune import Item


@exportkit_command("info", short_help="Say what is in it.")
def info(as_json: bool) -> None:
    """Say where the cache is, what is in it, and what a process uses now.

    First what was used least recently, which is what `prune` removes first.
    """
    from exportkit.runtime.cache import cache_directory
    from exportkit.runtime.cache.prune import cache_items

    items = cache_items()
    total = sum(item.size for item in items)
    if as_json:
        print_json({"directory": cache_directory(), "size": total, "items": [*map(asdict, items)]})
        return
    click.echo(f"{cache_directory()}: {size_text(total)}")
    print_table(_rows(items))


@exportkit_command("prune", short_help="Remove what is not needed.")
@click.option("--max-size", "max_bytes", callback=byte_size, metavar="SIZE", help="Keep at most so much, such as 2GB.")
@click.option(
    "--older-than",
    "unused_for",
    callback=duration,
    metavar="TIME",
    help="Remove what was not used for so long: 30d, 12h.",
)
@click.option("--all", "everything", is_flag=True, help="Remove all that no process uses.")
def prune(as_json: bool, **limits: Any) -> None:
    """Remove what killed processes left behind, and what the limits leave no room for.

    What was used least recently goes first. What a running process uses stays; the next load of a package unpacks and
    verifies again what is gone.

    \b
    exportkit cache prune                                   only what killed processes left
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
    click.echo(f"removed {len(pruned.removed)}, {size_text(freed)}; {size_text(left)} left")


@command_group("cache", [info, prune], short_help="What loading packages leaves behind: look, or remove.")
def command() -> None:
    """What loading packages leaves behind: operator libraries and compiled code, unpacked, and what was verified.

    It is in $EXPORTKIT_CACHE, or in exportkit under $XDG_CACHE_HOME or ~/.cache, and may be deleted at any time.
    """


def _rows(items: Sequence[Item]) -> list[tuple[str, ...]]:
    now = time.time()
    return [
        (
            item.kind,
            size_text(item.size),
            "in use" if item.in_use else f"used {max(now - item.used, 0) / 86400:.1f} days ago",
            str(item.path),
        )
        for item in items
    ]
