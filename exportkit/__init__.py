"""Turns a PyTorch module with custom operators into one verified, self-contained .pt2."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from exportkit.runtime.loader import load as load
    from exportkit.runtime.model import Model as Model
    from exportkit.runtime.session import Session as Session
    from exportkit.spec import ExportSpec as ExportSpec
    from exportkit.spec import Method as Method
    from exportkit.spec import Tolerance as Tolerance
    from exportkit.verify.self_test import self_test as self_test

__version__ = "0.1.0"
__all__ = ["ExportSpec", "Method", "Model", "Session", "Tolerance", "load", "self_test"]

# Each name is imported on first use, so that --help need not wait for torch.
_HOMES = {
    "ExportSpec": "exportkit.spec",
    "Method": "exportkit.spec",
    "Model": "exportkit.runtime.model",
    "Session": "exportkit.runtime.session",
    "Tolerance": "exportkit.spec",
    "load": "exportkit.runtime.loader",
    "self_test": "exportkit.verify.self_test",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(globals() | _HOMES)
