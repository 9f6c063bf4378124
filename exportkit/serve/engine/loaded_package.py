"""What a thread has loaded and warmed up, before it is served."""

from __future__ import annotations

from dataclasses import dataclass

from exportkit.serve.engine.model_copy import ModelCopy, SharedModel
from exportkit.serve.engine.model_description import ModelDescription
from exportkit.serve.engine.servable import Servable


@dataclass(frozen=True, eq=False)
class LoadedCopies:
    """What a thread has loaded and warmed up, for `ServedModel` to serve."""

    copies: tuple[ModelCopy, ...]
    described: ModelDescription
    warm_up: bool = True

    def close(self) -> None:
        """Frees the copies. Blocks."""
        for copy in self.copies:
            copy.close()


@dataclass(frozen=True, eq=False)
class LoadedPackage:
    """The methods of a package that a thread has loaded and warmed up."""

    methods: tuple[LoadedCopies, ...]
    offered: Servable
    models: tuple[SharedModel, ...]

    def close(self) -> None:
        """Frees the copies. Blocks."""
        for method in self.methods:
            method.close()
