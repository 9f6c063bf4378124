"""A load of a package, which sequences stay with until they end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

from exportkit.package.manifest import Manifest
from exportkit.serve.engine.model_copy import SharedModel
from exportkit.serve.protocol.inference import InferAnswer, InferRequest

Model_co = TypeVar("Model_co", covariant=True)


class Answering(Protocol):
    """A method, as the sequences of its load see it."""

    async def infer(self, request: InferRequest, /) -> InferAnswer:
        """Answers a request. Raises a ServeError."""


class PackageMethods(Protocol[Model_co]):
    """The methods of a package, as each of them sees them: `ServedPackage` says what each attribute is."""

    @property
    def name(self) -> str:
        """The name of the package."""

    @property
    def models(self) -> Mapping[str, Model_co]:
        """What is served, by method."""

    def chosen(self, asked: str, method: str | None, /) -> Model_co:
        """Returns the method that a request means."""


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
        self.models: dict[str, Answering] = {}
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
