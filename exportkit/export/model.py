"""MODEL: from what the command line names to something that can be traced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from exportkit.package.manifest import Manifest
from exportkit.spec import ExportSpec

BUILT_IN = ("arr-coc",)


@dataclass(frozen=True)
class ResolvedModel:
    """A model and where it came from.

    Attributes:
        spec: The model with its example inputs.
        name: MODEL as it was given, relative to nothing: what a package records as its source. None for a spec that
            was passed from Python.
        model_kwargs: Given to the callable that made it.
        seed: Of torch's generators while it was made.
        program: The ExportedProgram, where MODEL is one.
        manifest: Of the artifact the program came in, if that was ours.
        artifact: That file.
    """

    spec: ExportSpec
    name: str | None = None
    model_kwargs: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    program: torch.export.ExportedProgram | None = None
    manifest: Manifest | None = None
    artifact: Path | None = None


def resolve(
    model: str,
    *,
    model_kwargs: Mapping[str, Any] | None = None,
    inputs: Sequence[str] = (),
    weights: Path | None = None,
    op_libraries: Sequence[Path] = (),
    seed: int = 0,
) -> ResolvedModel:
    """Finds MODEL.

    Args:
        model: A built-in name (`arr-coc`), `package.module:attr`, `path/file.py:attr`, or an ExportedProgram `.pt2`.
            The attribute is an ExportSpec, a callable that returns one, an nn.Module or a callable that returns one.
        model_kwargs: For the callable.
        inputs: Example inputs, as "NAME=float32[2,3,256,256]". An nn.Module needs all of them; they replace a spec's.
        weights: A safetensors file with every parameter and buffer of the model.
        op_libraries: Operator libraries, loaded before the model is imported, after those of the spec.
        seed: Of torch's generators while the model is made.

    Raises:
        ModelNotFoundError: MODEL names nothing that can be imported, or something that is no model.
        UsageError: Keyword arguments, inputs or weights do not fit the model.
        LibraryLoadError: An operator library cannot be loaded.
        PackageError: The `.pt2` is ours and breaks a rule of the format.
    """
    raise NotImplementedError
