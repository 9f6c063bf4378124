"""A load of a package, which sequences stay with until they end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from exportkit.package.manifest import Manifest
from exportkit.serve.engine.model_copy import SharedModel

if TYPE_CHECKING:
    from exportkit.serve.engine.served import ServedModel


class Home:
    """A load of a package, on which sequences run.

    Attributes:
        manifest: The package's manifest.
        models: What is served of the load, by method.
        counts: The sequences that run on each copy.
    """

    def __init__(self, manifest: Manifest, copies: Sequence[SharedModel]) -> None:
        """No method is served yet."""
        self.manifest = manifest
        self.models: dict[str, ServedModel] = {}
        self.counts = [0] * len(copies)
        self._copies = copies

    @property
    def count(self) -> int:
        """The sequences that run on it."""
        return sum(self.counts)

    def emptiest(self) -> int:
        """Returns the copy that a new sequence should run on: one that lives, with the fewest sequences."""
        copies = range(len(self._copies))
        return min(copies, key=lambda place: (not self._copies[place].alive, self.counts[place]))
