"""CHGNet's wheel is enough: the packages of its converters of files and of its dynamics are not called here.

Importing this lets `import chgnet.model` go through where they are not installed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_NOT_CALLED = ("ase", "monty", "nvidia_smi", "pymatgen")


class _Named(ModuleType):
    """A module in which every name is a class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _Finder:
    """Finds modules of packages that are not installed."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] not in _NOT_CALLED:
            return None
        return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Named(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is in it."""


sys.meta_path.append(_Finder())  # type: ignore[arg-type]
