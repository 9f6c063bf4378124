"""One version of a model that is served."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from exportkit.package.manifest import Manifest
from exportkit.serve.engine.statistics import Statistics
from exportkit.serve.protocol.inference import InferAnswer, InferRequest


class ServedModel:
    """A loaded package with its queue and its runners. All methods are for the event loop's thread.

    Attributes:
        name: The name by which it is served.
        version: Its version, as text.
        manifest: The package's manifest.
        max_body: The most bytes that a request's tensors can have, by the manifest's ranges.
        counted: What was counted since the server began to serve this version.
    """

    name: str
    version: str
    manifest: Manifest
    max_body: int
    counted: Statistics

    @property
    def ready(self) -> bool:
        """Whether it is warmed up, and neither unloads nor lost its worker process."""
        raise NotImplementedError

    def admit(self, size: int) -> AbstractContextManager[None]:
        """Reserves room for a body of `size` bytes before it is read; leaving the context gives it back.

        Raises:
            TooLargeError: No request of the model can be that large.
            QueueFullError: As much waits as may.
            NotReadyError: The model is not ready, or the server drains.
        """
        raise NotImplementedError

    async def infer(self, request: InferRequest) -> InferAnswer:
        """Answers a request. Cancelling the task takes the request out of the queue.

        Raises:
            ServeError: The class says why.
        """
        raise NotImplementedError

    def metadata(self) -> dict[str, Any]:
        """Returns the protocol's model metadata: name, versions, platform, inputs and outputs."""
        raise NotImplementedError

    def config(self) -> dict[str, Any]:
        """Returns the model's configuration as Triton's JSON has it."""
        raise NotImplementedError

    def statistics(self) -> dict[str, Any]:
        """Returns an element of `model_stats` of Triton's statistics JSON."""
        raise NotImplementedError
