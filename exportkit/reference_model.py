"""What the eager model of an artifact is made from: what the caller names, and nothing that a file names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec

from exportkit.installed import installed_models

_PLAIN = re.compile(r"[\w./:-]+", re.ASCII)  # safe in a shell and on a terminal


@dataclass(frozen=True)
class ReferenceModel:
    """The eager model of an artifact, as the caller names it.

    Attributes:
        model: MODEL. None takes the name that the artifact recorded, but only if an installed package has registered
            that very name (`arr-coc`) and no signature is required: what a file names is not imported.
        weights: The safetensors file that the model was exported with.
        op_libraries: Operator libraries that the model or the artifact calls, or names of modules that load some.
    """

    model: str | None = None
    weights: Path | None = None
    op_libraries: Sequence[Path | str] = ()

    def model_of(self, recorded: str | None, demanded_by: str | None) -> str | None:
        """Returns the MODEL that may be imported, which the artifact may have recorded; None if there is none.

        What requires a signature, if anything does, does not cover the source of a model.
        """
        if self.model is None and demanded_by is None and recorded in installed_models():
            return recorded
        return self.model


def unnamed(recorded: str | None, demanded_by: str | None) -> str:
    """Says why `ReferenceModel.model_of` finds no MODEL, and how to name it."""
    if recorded is None:
        why = "the artifact was exported from an object, not from a MODEL that can be imported"
    elif demanded_by is None:
        why = "a model is imported only if its caller names it"
    else:
        why = f"{demanded_by} requires a signature, which does not cover the model's source"
    return f"{why}; name it with --model {recorded if recorded and _PLAIN.fullmatch(recorded) else 'MODEL'}"


class ReferenceModelFiles(msgspec.Struct, frozen=True):
    """An ReferenceModel on its way to another process: absolute paths, and names of modules."""

    model: str | None
    weights: str | None
    libraries: tuple[str, ...]

    @classmethod
    def of(cls, eager: ReferenceModel, model: str | None) -> Self:
        """Describes a source whose MODEL may be `model`."""
        libraries = tuple(str(each.resolve() if isinstance(each, Path) else each) for each in eager.op_libraries)
        return cls(model, str(eager.weights.resolve()) if eager.weights else None, libraries)

    def source(self) -> ReferenceModel:
        """Returns it in this process."""
        libraries = [Path(each) if each.startswith("/") else each for each in self.libraries]
        return ReferenceModel(self.model, Path(self.weights) if self.weights else None, libraries)
