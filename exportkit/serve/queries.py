"""What a server is asked beside inferences, answered with the protocol's JSON: HTTP and gRPC share it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import exportkit
from exportkit.serve.engine.repository import Repository
from exportkit.serve.engine.served import ServedModel

_EXTENSIONS = ("model_repository", "model_configuration", "statistics", "schedule_policy", "sequence")


class Queries:
    """Answers from a repository.

    Whatever names a model that is not served raises NotServedError.
    """

    def __init__(self, repository: Repository) -> None:
        self.repository = repository

    def server_metadata(self, *extensions: str) -> dict[str, Any]:
        """Returns the server's name, version and extensions, with those of the way in which it is asked."""
        return {"name": "exportkit", "version": exportkit.__version__, "extensions": [*extensions, *_EXTENSIONS]}

    def statistics(self, name: str, version: str) -> dict[str, Any]:
        """Returns what was counted of a version, of all versions of a model, or (no name) of all models.

        The name of a package without a default method stands for all of its methods.
        """
        return {"model_stats": [model.statistics() for model in self._asked(name, version)]}

    def metadata(self, name: str, version: str) -> dict[str, Any]:
        """Returns the metadata of a model."""
        asked = self.repository.named(name, version)
        versions = [model.version for model in self.repository.models() if model.name == asked.name]
        return {**asked.metadata(), "versions": versions or [asked.version]}

    def config(self, name: str, version: str) -> dict[str, Any]:
        """Returns the configuration of a model."""
        return self.repository.named(name, version).config()

    def index(self, only_ready: bool) -> list[dict[str, str]]:
        """Returns the models that there are, or those that answer."""
        return [asdict(entry) for entry in self.repository.index() if entry.state == "READY" or not only_ready]

    async def load(self, name: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Loads a model. A client that goes away does not leave it half loaded."""
        await asyncio.shield(self.repository.load(name, parameters))
        return {}

    async def unload(self, name: str) -> dict[str, Any]:
        """Unloads a model, likewise."""
        await asyncio.shield(self.repository.unload(name))
        return {}

    def _asked(self, name: str, version: str) -> Sequence[ServedModel]:
        if not name:
            return self.repository.models()
        asked = self.repository.named(name, version)  # raises what is wrong with it
        return [each for each in self.repository.models() if each.name in asked.names and version in ("", each.version)]
