"""Language models of transformers as packages that generate: prefill and decode over a cache of a session's own.

`spec(model, cache_length=...)` is an ExportSpec, and `vision_spec(model, inputs)` that of the part that sees. Where
transformers takes other exporters (5.24), ExportkitExporter is one of them, and importing this module registers it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

try:
    import transformers
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "exportkit.transformers needs transformers: pip install 'exportkit[transformers]'", name=error.name
    ) from error

from exportkit.transformers.adapters import Lora as Lora
from exportkit.transformers.language_model import spec as spec
from exportkit.transformers.vision import vision_spec as vision_spec

if TYPE_CHECKING:
    from exportkit.transformers.backend import ExportkitConfig as ExportkitConfig
    from exportkit.transformers.backend import ExportkitExporter as ExportkitExporter
    from exportkit.transformers.backend import ExportkitRunner as ExportkitRunner

__all__ = ["ExportkitConfig", "ExportkitExporter", "ExportkitRunner", "Lora", "spec", "vision_spec"]


def _takes_exporters() -> bool:
    try:
        return hasattr(importlib.import_module("transformers.exporters"), "register_backend")
    except ModuleNotFoundError:
        return False


if _takes_exporters():
    importlib.import_module("exportkit.transformers.backend")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if not _takes_exporters():
        raise ImportError(
            f"transformers {transformers.__version__} takes no exporters from outside: {name} needs 5.24. Without it, "
            "export exportkit.transformers.spec(model, cache_length=...)."
        )
    return getattr(importlib.import_module("exportkit.transformers.backend"), name)
