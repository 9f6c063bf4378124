"""The models that are served."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from exportkit.serve.engine.served import ServedModel
from exportkit.serve.serve_options import ServeOptions

State = Literal["UNKNOWN", "READY", "UNAVAILABLE", "LOADING", "UNLOADING"]


@dataclass(frozen=True)
class IndexEntry:
    """A version of a model in the repository. `reason` says why it is not ready."""

    name: str
    version: str
    state: State
    reason: str


class Repository:
    """The models that are served. All methods are for the event loop's thread."""

    def __init__(self, options: ServeOptions) -> None:
        """Nothing is loaded yet."""
        raise NotImplementedError

    async def open(self) -> None:
        """Loads and warms up every package. A package that cannot be loaded raises its error."""
        raise NotImplementedError

    async def drain(self) -> None:
        """Accepts no more requests, waits until every accepted one is answered, and closes the models."""
        raise NotImplementedError

    @property
    def ready(self) -> bool:
        """Whether every model is ready and the server does not drain."""
        raise NotImplementedError

    @property
    def draining(self) -> bool:
        """Whether `drain` was called."""
        raise NotImplementedError

    def model(self, name: str, version: str = "") -> ServedModel:
        """Returns a model. Without a version, the newest that is ready.

        Raises:
            NotServedError: No such model or version.
            NotReadyError: It is not loaded.
        """
        raise NotImplementedError

    def models(self) -> Sequence[ServedModel]:
        """Returns every version that is loaded, by name and version."""
        raise NotImplementedError

    def index(self) -> Sequence[IndexEntry]:
        """Returns what there is, loaded or not."""
        raise NotImplementedError

    async def load(self, name: str, parameters: Mapping[str, Any]) -> None:
        """Loads a model of the repository, or loads it again while the old one goes on answering.

        Raises:
            BadRequestError: A parameter is not allowed: `file:` content would be code of a stranger.
            NotServedError: The repository has no such model.
            BackendError: The package cannot be loaded. The old one goes on.
        """
        raise NotImplementedError

    async def unload(self, name: str) -> None:
        """Unloads a model after its accepted requests.

        Raises:
            NotServedError: No such model is loaded.
        """
        raise NotImplementedError
