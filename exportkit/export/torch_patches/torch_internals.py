"""Replaces attributes of torch that have no entry in the table (`patch_table.py`) yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from exportkit.errors import ExportError
from exportkit.support import exporting_torches


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replaces an attribute of a class or module of torch while the block runs.

    Args:
        owner: The class or module that defines the attribute.
        name: The attribute's name.
        make: Takes the original and returns its replacement.

    Raises:
        ExportError: This torch does not define it. Exporting without the replacement could write a wrong package.
    """
    if name not in vars(owner):
        raise ExportError(
            f"torch {torch.__version__} has no {owner.__name__}.{name}, which exportkit needs to replace",
            hint=f"Export with torch {exporting_torches()}.",
        )
    original = vars(owner)[name]
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        setattr(owner, name, original)
