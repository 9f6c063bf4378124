"""The session of a sequence, which its first step makes."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from exportkit.runtime.model import Model
from exportkit.runtime.session import Session
from exportkit.serve.statuses import SequenceError

if TYPE_CHECKING:
    from exportkit.serve.engine.served_package import ServedPackage

ENDED = "the sequence ended before its step ran"
AGAIN = "Begin it again with `sequence_start`: its state is lost."


class HeldSession:
    """A session that the first step makes, in the thread of its runner. Any thread may close it.

    Attributes:
        load: The load on which the sequence runs.
        replica: The number of its replica.
        sizes: The sizes of the state's dimensions.
    """

    def __init__(self, load: ServedPackage, replica: int, sizes: Mapping[str, int]) -> None:
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
