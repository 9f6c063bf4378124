"""`exportkit doctor`."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

import click
from msgspec.structs import asdict

from exportkit.cli.app import command as exportkit_command
from exportkit.cli.output import print_json, print_table, progress
from exportkit.cli.shared_options import byte_size, duration, flag, repeatable
from exportkit.progress import bytes_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from exportkit.runtime.cache.prune import Item


def _limits(context: click.Context, parameter: click.Parameter, values: Sequence[str]) -> dict[str, Any] | None:
    """Converts the limits of --prune-cache to arguments of `prune`; None: it was not given."""
    limits: dict[str, Any] = {}
    for value in values:
        if value == "all":
            limits["everything"] = True
        elif value[-1:].lower() == "b":
            limits["max_bytes"] = byte_size(context, parameter, value)
        elif value != "leftovers":
            limits["unused_for"] = duration(context, parameter, value)
    return limits if values else None


@exportkit_command("doctor")
@flag("--cache", "List what the cache of loaded packages holds instead.")
@repeatable(
    "--prune-cache",
    "2GB|30d|all|leftovers",
    "Remove from the cache what was used least recently, until so much is left; what was unused for so long; all; "
    "or only what killed processes left.",
    to="limits",
    callback=_limits,
)
def command(cache: bool, limits: dict[str, Any] | None, as_json: bool) -> None:
    """Show whether this machine can export, compile and load, and what is missing.

    The exit code is 4 if it cannot load a CPU package, export, or compile for the CPU. A missing GPU is not a failure.

    The cache has unpacked operator libraries and compiled code of loaded packages, and verified digests. It is in
    $EXPORTKIT_CACHE, or in exportkit under $XDG_CACHE_HOME or ~/.cache. You may delete it at any time. Entries that a
    running process uses are never pruned, and the next load of a package makes removed ones again.

    \b
    exportkit doctor
    exportkit doctor --prune-cache 2GB --prune-cache 30d
    """  # noqa: D301 (click wants the control character, to keep the lines below it)
    if limits is not None:
        _prune(limits, as_json=as_json)
    elif cache:
        _list_cache(as_json=as_json)
    else:
        _diagnose(as_json=as_json)


def _diagnose(*, as_json: bool) -> None:
    from exportkit.doctor import BASIC, diagnose

    with progress() as step:
        machine = diagnose(step)
    able = all(capability.ok for capability in machine.capabilities if capability.name in BASIC)
    if as_json:
        print_json({"ok": able, **dataclasses.asdict(machine)})
    else:
        click.echo("This machine:")
        print_table([("ok" if f.ok else "--", f.name, f.detail) for f in machine.findings])
        click.echo("It can:")
        reasons = [("yes" if a.ok else "no", a.name, f"missing: {', '.join(a.missing)}") for a in machine.capabilities]
        print_table([row if row[0] == "no" else row[:2] for row in reasons])
        hints = [f"{f.name}: {f.hint}" for f in machine.findings if f.hint and not f.ok]
        if hints:
            click.echo("What to do:")
            print_table([(hint,) for hint in hints])
    if not able:
        raise click.exceptions.Exit(4)


def _list_cache(*, as_json: bool) -> None:
    from exportkit.runtime.cache import cache_directory
    from exportkit.runtime.cache.prune import cache_items

    items = cache_items()
    total = sum(item.size for item in items)
    if as_json:
        print_json({"directory": cache_directory(), "size": total, "items": [*map(asdict, items)]})
        return
    click.echo(f"{cache_directory()}: {bytes_text(total)}")
    print_table(_rows(items))


def _prune(limits: dict[str, Any], *, as_json: bool) -> None:
    from exportkit.runtime.cache.prune import prune

    pruned = prune(**limits)
    freed, left = (sum(item.size for item in items) for items in (pruned.removed, pruned.kept))
    if as_json:
        parts = {"removed": [*map(asdict, pruned.removed)], "kept": [*map(asdict, pruned.kept)]}
        print_json({"freed": freed, "left": left, **parts})
        return
    print_table(_rows(pruned.removed))
    click.echo(f"removed {len(pruned.removed)}, {bytes_text(freed)}; {bytes_text(left)} left")


def _rows(items: Sequence[Item]) -> list[tuple[str, ...]]:
    used = [time.strftime("used %Y-%m-%d %H:%M", time.localtime(item.used)) for item in items]
    return [
        (item.kind, bytes_text(item.size), "in use" if item.in_use else when, str(item.path))
        for item, when in zip(items, used)
    ]
