"""The C interface with the face of exportkit.Model and exportkit.Session: one test proves a promise of both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from exportkit import errors
from tests.runtime import c_interface
from tests.runtime.c_interface import Refused, view


def called(call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Calls it; what it refuses is raised as Python's class of that error."""
    try:
        return call(*arguments, **named)
    except Refused as refused:
        raise getattr(errors, refused.name)(refused.message, hint=refused.hint or None) from refused


class _Methods:
    """Methods as attributes, which take tensors and return the first output."""

    def __getattr__(self, name: str) -> Callable[..., torch.Tensor]:
        def method(*inputs: torch.Tensor) -> torch.Tensor:
            outputs = called(self._run, name, *(view(tensor.numpy()) for tensor in inputs))
            return torch.from_dlpack(outputs[0])

        return method

    def _run(self, name: str, *views: object) -> Any:
        raise NotImplementedError

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        raise NotImplementedError


class CModel(_Methods):
    """A model that the C interface opened."""

    def __init__(self, opened: c_interface.Model) -> None:
        self._model = opened
        self._run, self.close = opened.run_method, opened.close

    def session(self, **sizes: int) -> CSession:
        """Opens a session."""
        return CSession(called(self._model.session, **sizes), sizes)

    def swap_weights(self, path: Path) -> None:
        """Takes the weights of a file."""
        called(self._model.swap_weights, path)


class CSession(_Methods):
    """A session that the C interface opened."""

    def __init__(self, opened: c_interface.Session, sizes: dict[str, int]) -> None:
        self._session, self.sizes = opened, sizes
        self._run = opened.run

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """The live state."""
        return {name: torch.from_numpy(array) for name, array in called(self._session.state).items()}

    def fork(self) -> CSession:
        """Another one with a copy of the state."""
        return CSession(called(self._session.fork), self.sizes)

    def reset(self) -> None:
        """Begins again."""
        called(self._session.reset)

    def save(self, path: Path) -> None:
        """Writes the state."""
        called(self._session.save, path)

    def load_state(self, path: Path) -> None:
        """Reads the state."""
        called(self._session.load_state, path)

    def close(self) -> None:
        """Closes it."""
        called(self._session.close)
