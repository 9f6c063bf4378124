"""From a model to an artifact: find it, check it, trace it, compile it, record what it answers."""

from __future__ import annotations

from exportkit.export.artifact import export_aoti, export_program
from exportkit.export.export_options import CompileOptions, TraceOptions
from exportkit.export.resolve import resolve
from exportkit.export.resolved import EagerModel, ResolvedModel, SavedProgram

__all__ = [
    "CompileOptions",
    "EagerModel",
    "ResolvedModel",
    "SavedProgram",
    "TraceOptions",
    "export_aoti",
    "export_program",
    "resolve",
]
