"""From a model to an artifact: find it, check it, trace it, compile it, record what it answers."""

from __future__ import annotations

from exportkit.export.artifact import export_aoti, export_program
from exportkit.export.model import ResolvedModel, resolve

__all__ = ["ResolvedModel", "export_aoti", "export_program", "resolve"]
