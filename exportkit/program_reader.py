"""Reads exported programs. That runs what their authors wrote, so callers first decide whom they trust."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.export import ExportedProgram
from torch.export.pt2_archive import _package


def read_program(path: Path) -> ExportedProgram:
    """Reads a file of torch.export.save. Torch raises many classes: zip, JSON, schema and operator errors."""
    with _silent_torch():
        try:
            return torch.export.load(path)
        except Exception as error:
            failure = error
        _package.load_pt2(str(path))  # raises the reason, which torch.export.load only logs
        raise failure


@contextmanager
def _silent_torch() -> Iterator[None]:
    """Torch logs errors that it handles, one of them with a traceback of logging itself."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
