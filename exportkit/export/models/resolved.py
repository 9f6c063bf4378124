"""The result of resolving MODEL: a module to trace, or saved programs."""

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
    """A model whose methods were read from a file as ExportedPrograms.

    Attributes:
        spec: A module with these methods, with the weights and the state of the model, and their example inputs.
        programs: The programs, by method.
        path: The file.
        manifest: The manifest, if exportkit wrote the file; None if torch.export.save did.
    """

    spec: ExportSpec
    programs: Mapping[str, torch.export.ExportedProgram]
    path: Path
    manifest: Manifest | None


ResolvedModel: TypeAlias = EagerModel | SavedProgram
