"""Results to stdout, progress to stderr."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

Progress = Callable[[str], None]


def print_json(document: Any) -> None:
    """One JSON document. Numbers that JSON has no word for become the strings "inf", "-inf" and "nan"."""
    click.echo(json.dumps(_plain(document), indent=2))


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    return value


def print_table(rows: Iterable[Sequence[str]], *, indent: int = 2) -> None:
    """Left-aligned columns; a row of one cell is a heading of its own."""
    lines = [[printable(str(cell)) for cell in row] for row in rows]
    columns = max((len(line) for line in lines), default=0)
    widths = [max((len(line[i]) for line in lines if len(line) > i + 1), default=0) for i in range(columns)]
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths)]
        click.echo((" " * indent + "  ".join(cells)).rstrip())


def printable(text: str) -> str:
    """The text with what would move a terminal's cursor, or turn its letters around, spelled out.

    A package's strings are whatever its maker wrote; none of them shall look like what we say of it.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def printable_lines(text: str, margin: str) -> str:
    """A text of several lines, printable, each with a margin: whoever wrote it, none of them starts where ours do."""
    return "\n".join(margin + printable(line) for line in text.split("\n"))


def size_text(size: int) -> str:
    """`1.4 MB`: decimal units, as disks and networks have them."""
    value = float(size)
    for unit in ("bytes", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            break
        value /= 1000
    return f"{size} bytes" if unit == "bytes" else f"{value:.1f} {unit}"


@contextmanager
def progress() -> Iterator[Progress]:
    """Says on stderr what is being done: a spinner on a terminal, a plain line for each step elsewhere."""
    if not sys.stderr.isatty():
        yield lambda text: click.echo(f"{printable(text)} ...", err=True)
        return
    from rich.console import Console
    from rich.markup import escape

    console = Console(stderr=True)
    current: tuple[str, float] | None = None
    with console.status("") as status:

        def finish() -> None:
            if current is not None:
                console.print(f"[green]done[/] {escape(current[0])} [dim]{time.monotonic() - current[1]:.1f} s[/]")

        def step(text: str) -> None:
            nonlocal current
            finish()
            current = (printable(text), time.monotonic())
            status.update(escape(current[0]))

        yield step
        finish()
