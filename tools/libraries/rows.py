"""The rows of the table: those of every module of this package that has some."""

from __future__ import annotations

import importlib
import pkgutil

import tools.libraries
from tools.libraries.library import Library

_NAMES = [each.name for each in pkgutil.iter_modules(tools.libraries.__path__)]
_MODULES = [importlib.import_module(f"tools.libraries.{name}") for name in _NAMES if name.startswith(("cpu", "gpu"))]
ROWS: tuple[Library, ...] = tuple(row for module in _MODULES for row in module.ROWS)
