"""Waits for changes in source files."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

_SUFFIXES = (".c", ".cc", ".cpp", ".cu", ".cuh", ".cxx", ".h", ".hpp", ".inc", ".py")
_SKIPPED = {"build", "dist", "node_modules", "__pycache__"}
_SECONDS = 0.5

State = dict[str, tuple[int, int]]


def changes(folder: Path, seconds: float = _SECONDS) -> Iterator[list[str]]:
    """Yields the files that changed, whenever some did, without end.

    What changes from this call on is yielded, also while the caller works. A change is yielded when nothing else has
    changed for a while, because an editor writes several files, or one in several steps.

    Args:
        folder: Where the sources are. Folders that hold no sources, such as `build`, are skipped.
        seconds: How long to wait between two looks.
    """
    return _changes(folder, source_files(folder), seconds)


def _changes(folder: Path, seen: State, seconds: float) -> Iterator[list[str]]:
    while True:
        time.sleep(seconds)
        now = source_files(folder)
        if now == seen:
            continue
        while (later := _after(folder, seconds)) != now:
            now = later
        changed = sorted(path for path in seen.keys() | now.keys() if seen.get(path) != now.get(path))
        seen = now
        if changed:  # an editor may have written what was there before
            yield changed


def _after(folder: Path, seconds: float) -> State:
    time.sleep(seconds)
    return source_files(folder)


def source_files(folder: Path) -> State:
    """Returns the time and the size of each source file, by its path in the folder."""
    found = {}
    for root, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in _SKIPPED and not name.startswith(".")]
        for name in files:
            if name.endswith(_SUFFIXES):
                path = os.path.join(root, name)
                try:
                    status = os.stat(path)
                except OSError:  # it was removed meanwhile
                    continue
                found[os.path.relpath(path, folder)] = (status.st_mtime_ns, status.st_size)
    return found
