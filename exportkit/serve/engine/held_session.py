"""The session of a sequence, which its first step makes."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from exportkit.package.manifest import Manifest
from exportkit.runtime.model import Model
from exportkit.runtime.session import Session
from exportkit.serve.engine.model_replica import ModelReplica
from exportkit.serve.statuses import SequenceError

ENDED = "the sequence ended before its step ran"
AGAIN = "Begin it again with `sequence_start`: its state is lost."


class SequenceLoad(Protocol):
    """A load of a package, as sequences see it: `PackageLoad`."""

    version: str
    manifest: Manifest

    @property
    def replicas(self) -> Sequence[ModelReplica]:
        """The package on each device."""

    @property
    def models(self) -> Mapping[str, Any]:
        """What is served, by method."""


class HeldSession:
    """A session that the first step makes, in the thread of its runner. Any thread may close it.

    Attributes:
        load: The load on which the sequence runs.
        replica: The number of its replica.
        sizes: The sizes of the state's dimensions.
    """

    def __init__(self, load: SequenceLoad, replica: int, sizes: Mapping[str, int]) -> None:
        """Has no session yet."""
        self.load = load
        self.replica = replica
        self.sizes = sizes
        self._lock = threading.Lock()
        self._session: Session | None = None
        self._model: Model | None = None
        self._closed = False

    @property
    def lost(self) -> bool:
        """Whether the process with the state died."""
        return self._model is not None and not self._model.alive

    @property
    def closed(self) -> bool:
        """Whether the sequence ended."""
        return self._closed

    def open(self, model: Model) -> Session:
        """Returns the session, which it makes if there is none. Raises the errors of `Model.session`."""
        with self._lock:
            if self._closed:
                raise SequenceError(ENDED, hint=AGAIN)
            if self._session is None:
                self._model, self._session = model, model.session(**self.sizes)
            return self._session

    def close(self) -> None:
        """Frees the state, after a step that runs. May block for a moment."""
        with self._lock:
            self._closed = True
            if self._session is not None:
                self._session.close()
                self._session = None
