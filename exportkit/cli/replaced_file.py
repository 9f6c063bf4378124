"""Notices that somebody else wrote the file that a command is about to write."""

from __future__ import annotations

from pathlib import Path

from exportkit.progress import Progress

Stamp = tuple[int, int] | None  # of a file that is there: its number and when it was written


class ReplacedFile:
    """The output of a command that takes minutes, in which another one may write it. The last one wins."""

    def __init__(self, path: Path | None) -> None:
        """Looks at the file before the work begins; None if none will be written."""
        self._path = path
        self._before = _stamp(path)
        self.notice = ""

    def watched(self, step: Progress) -> Progress:
        """Returns a callback for steps that looks again when the file is written."""

        def said(text: str) -> None:
            step(text)
            if text == f"writing {self._path}" and _stamp(self._path) != self._before:
                self.notice = f"{self._path} was written by another process meanwhile, and is replaced"

        return said


def _stamp(path: Path | None) -> Stamp:
    if path is None or not path.exists():
        return None
    found = path.stat()
    return found.st_ino, found.st_mtime_ns
