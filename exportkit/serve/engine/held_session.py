"""The session of a sequence, which its first step makes."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from exportkit.errors import StateError
from exportkit.package.manifest import Manifest
from exportkit.runtime.model import Model
from exportkit.runtime.session import Session
from exportkit.serve.engine.model_replica import ModelReplica
from exportkit.serve.statuses import BadRequestError, SequenceError

ENDED = "the sequence ended before its step ran"
_MOST_NAME = 100
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
        adapter: The file that sets a part of the state before the first step. None: no part.
    """

    def __init__(self, load: SequenceLoad, replica: int, sizes: Mapping[str, int], adapter: Path | None) -> None:
        """Has no session yet."""
        self.load = load
        self.replica = replica
        self.sizes = sizes
        self.adapter = adapter
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
        """Returns the session, which it makes if there is none.

        Raises:
            BadRequestError: The model does not take the adapter. Other errors are those of `Model.session`.
        """
        with self._lock:
            if self._closed:
                raise SequenceError(ENDED, hint=AGAIN)
            if self._session is None:
                session = model.session(**self.sizes)
                if self.adapter is not None:
                    _load_adapter(session, self.adapter)
                self._model, self._session = model, session
            return self._session

    def close(self) -> None:
        """Frees the state, after a step that runs. May block for a moment."""
        with self._lock:
            self._closed = True
            if self._session is not None:
                self._session.close()
                self._session = None


def adapter_file(folder: Path | None, name: str) -> Path:
    """Returns the file of an adapter that PEFT saved into a folder of this name.

    Raises:
        BadRequestError: There is none in the folder of adapters, or no such folder.
    """
    if folder is None:
        raise BadRequestError("this server has no adapters", hint="`exportkit serve --adapters FOLDER` allows some.")
    file = folder / name / "adapter_model.safetensors"
    if Path(name).name != name or name in ("", "..") or len(name) > _MOST_NAME or not file.is_file():
        raise BadRequestError(f"there is no adapter {name!r:.80}")
    return file


def _load_adapter(session: Session, file: Path) -> None:
    try:
        session.load_state(file, partial=True)
    except StateError as error:
        session.close()
        said = error.message.replace(f"{file.parent}/", "")
        raise BadRequestError(f"the adapter {file.parent.name} does not fit: {said}") from error
