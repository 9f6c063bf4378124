"""A file of results that grows with each operator, so that a run that is cut off loses only the last one."""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import Iterator
from pathlib import Path

import msgspec

from exportkit.errors import UsageError
from exportkit.operators.tools.checking import Checked, CheckOptions

_ANY_RUN = ("operators", "timeout", "memory", "references", "calls", "specs")
"""Options that a run which goes on may give otherwise: which operators, what they may take, what is known of them."""


class _Run(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first line.

    Attributes:
        source: What is checked.
        torch: torch's version.
        options: How.
    """

    source: str
    torch: str
    options: CheckOptions


class ResultsFile:
    """Lines of JSON: which run it is, and then what came of each operator.

    Attributes:
        path: The file.
        kept: What it has already, by operator.
    """

    def __init__(self, path: Path, source: str, options: CheckOptions, *, resume: bool) -> None:
        """Starts the file, or goes on with it.

        Args:
            path: The file.
            source: What is checked.
            options: How.
            resume: Whether what the file has is kept, if it exists.

        Raises:
            UsageError: The file is not of this kind, or it has results of something else.
        """
        self.path = path
        self.kept: dict[str, Checked] = {}
        run = _Run(source, importlib.metadata.version("torch"), options)
        lines = self._lines(run) if resume and path.exists() else [msgspec.json.encode(run)]
        with _written(path):
            path.write_bytes(b"".join(line + b"\n" for line in lines))

    def add(self, checked: Checked) -> None:
        """Appends a result."""
        with _written(self.path), self.path.open("ab") as file:
            file.write(msgspec.json.encode(checked) + b"\n")

    def _lines(self, run: _Run) -> list[bytes]:
        """Reads the results of a run like this one. A last line that is cut off is left out."""
        lines = self.path.read_bytes().split(b"\n")[:-1]
        try:
            before = msgspec.json.decode(lines[0] if lines else b"", type=_Run)
            found = [msgspec.json.decode(line, type=Checked) for line in lines[1:]]
        except msgspec.MsgspecError as error:
            raise UsageError(f"{self.path} has no results of `exportkit ops check`: {error}", hint=_ANOTHER) from None
        if difference := _difference(before, run):
            raise UsageError(f"{self.path} has results of another run: {difference}", hint=_ANOTHER)
        self.kept = {checked.report.operator: checked for checked in found}
        return lines


_ANOTHER = "Name another file, or leave out --resume, and it is replaced."


def _difference(before: _Run, now: _Run) -> str | None:
    for name in ("source", "torch"):
        if getattr(before, name) != getattr(now, name):
            return f"{name} was {getattr(before, name)}, and is {getattr(now, name)}"
    for name in CheckOptions.__struct_fields__:
        was, given = getattr(before.options, name), getattr(now.options, name)
        if name not in _ANY_RUN and was != given:
            return f"{name} was {was!r}, and is {given!r}"
    return None


@contextlib.contextmanager
def _written(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error
