"""Prints results to stdout and progress to stderr."""

from __future__ import annotations

import ctypes
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, TypeVar

import click

from exportkit.progress import Progress, note

T = TypeVar("T")

LONG = 30.0
"""The seconds after which a step is reported again."""


def print_json(document: Any) -> None:
    """Prints one JSON document. Infinities and NaN become the strings "inf", "-inf" and "nan"."""
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
    """Prints left-aligned columns. A row of one cell is a heading and widens no column."""
    lines = [[printable(str(cell)) for cell in row] for row in rows]
    columns = max((len(line) for line in lines), default=0)
    widths = [max((len(line[i]) for line in lines if len(line) > i + 1), default=0) for i in range(columns)]
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths)]
        click.echo((" " * indent + "  ".join(cells)).rstrip())


def printable(text: str) -> str:
    """Escapes characters that would move a terminal's cursor or reverse the text.

    A package's strings are untrusted; they must not pass for exportkit's own output. A path that Python could not
    decode, because the locale says ASCII, is read as UTF-8.
    """
    if any("\udc80" <= c <= "\udcff" for c in text):
        text = text.encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def printable_lines(text: str, margin: str) -> str:
    """Escapes and indents every line, so that untrusted text cannot pass for exportkit's own lines."""
    return "\n".join(margin + printable(line) for line in text.split("\n"))


@contextmanager
def progress() -> Iterator[Progress]:
    """Reports each step on stderr: with a spinner on a terminal, else with one plain line.

    A step that takes long is reported again, with its seconds. What the user's code prints meanwhile goes to stderr as
    well, since stdout has the result.
    """
    current, ended = ("", time.monotonic()), threading.Event()

    def remind() -> None:
        while not ended.wait(LONG):
            text, since = current
            if text and (seconds := time.monotonic() - since) >= LONG:
                again(f"{text}, for {seconds:.0f} s")

    with _stdout_to_stderr(), _steps() as (step, again):

        def noted(text: str) -> None:
            nonlocal current
            current = text, time.monotonic()
            note(text)
            step(text)

        reminder = threading.Thread(target=remind, daemon=True)
        reminder.start()
        try:
            yield noted
        finally:
            ended.set()
            reminder.join()


def with_progress(work: Callable[[Progress], Generator[T, None, None]]) -> Iterator[T]:
    """Yields what long work finds. Its steps are reported as by `progress`; between them stdout is the caller's."""
    reporting: list[Progress] = []
    with closing(work(lambda text: reporting[-1](text))) as results:
        while True:
            with progress() as step:
                reporting[:] = [step]
                found = next(results, None)
            if found is None:
                return
            yield found


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Sends stdout to stderr, that of C++ code and of child processes included."""
    if sys.__stdout__ is None or sys.__stderr__ is None:
        yield
        return
    out, err = sys.__stdout__.fileno(), sys.__stderr__.fileno()
    sys.__stdout__.flush()
    kept = os.dup(out)
    try:
        os.dup2(err, out)
        with redirect_stdout(sys.stderr):
            yield
    finally:
        ctypes.CDLL(None).fflush(None)  # what C++ code printed
        os.dup2(kept, out)
        os.close(kept)


@contextmanager
def _steps() -> Iterator[tuple[Progress, Progress]]:
    """Yields what reports a step, and what reports it again."""
    if not sys.stderr.isatty():

        def say(text: str) -> None:
            click.echo(f"{printable(text)} ...", err=True)

        yield say, say
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

        yield step, lambda text: status.update(escape(printable(text)))
        finish()
