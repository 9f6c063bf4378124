"""The rows of the table: those of every module of this package that has some."""

from __future__ import annotations

import importlib
import pkgutil

import tools.libraries
from tools.libraries.library import Library

_MODULES = [
    each.name for each in pkgutil.iter_modules(tools.libraries.__path__) if each.name.startswith(("cpu", "gpu"))
]
ROWS: tuple[Library, ...] = tuple(
    row for name in _MODULES for row in importlib.import_module(f"tools.libraries.{name}").ROWS
)
