"""The result of resolving MODEL: a module to trace, or a saved program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch

from exportkit.package.manifest import Manifest
from exportkit.spec import ExportSpec


@dataclass(frozen=True)
class EagerModel:
    """A module and how it was made.

    Attributes:
        spec: The module with its example inputs.
        name: MODEL as given, which a package records as its source. None for a spec passed from Python.
        model_kwargs: The arguments of the callable that made it.
        seed: The seed of torch's generators while it was made.
    """

    spec: ExportSpec
    name: str | None = None
    model_kwargs: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0


@dataclass(frozen=True)
class SavedProgram:
    """An ExportedProgram that was read from a file.

    Attributes:
        spec: Its module with its example inputs.
        program: The program.
        path: The file.
        manifest: The manifest, if exportkit wrote the file; None if torch.export.save did.
    """

    spec: ExportSpec
    program: torch.export.ExportedProgram
    path: Path
    manifest: Manifest | None


ResolvedModel: TypeAlias = EagerModel | SavedProgram
