"""The ways to run a package. One test proves what all of them promise.

Python's are in this process, in a worker, and without the C++ runtime. The C interface gets the face of exportkit.Model
and exportkit.Session here.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import exportkit
from exportkit import errors
from tests.runtime import c_interface
from tests.runtime.c_interface import Refused, view

PYTHON = ["here", "isolated", "without the C++ runtime"]
EVERY = [*PYTHON, "C"]


Open = Callable[[Path], AbstractContextManager[Any]]


def opener(request: pytest.FixtureRequest) -> Open:
    """Opens packages by the way that is the fixture's parameter, and closes them."""
    return contextmanager(partial(opened, request))


def opened(request: pytest.FixtureRequest, package: Path) -> Iterator[Any]:
    """The same for the only package of a fixture."""
    if request.param == "C":
        model: Any = CModel(request.getfixturevalue("c_library").open(package, runners=2))
    else:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("EXPORTKIT_RUNTIME", "python" if request.param == PYTHON[-1] else "auto")
            model = exportkit.load(package, isolate=request.param == "isolated", runners=2)
    with model:
        yield model


def called(call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Calls it; what it refuses is raised as Python's class of that error."""
    try:
        return call(*arguments, **named)
    except Refused as refused:
        raise getattr(errors, refused.name)(refused.message, hint=refused.hint or None) from refused


class _Methods(ABC):
    """Methods as attributes, which take tensors and return the first output."""

    _run: Callable[..., Any]

    def __getattr__(self, name: str) -> Callable[..., torch.Tensor]:
        def method(*inputs: torch.Tensor) -> torch.Tensor:
            outputs = called(self._run, name, *(view(tensor.numpy()) for tensor in inputs))
            return torch.from_dlpack(outputs[0])

        return method

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None: ...


class CModel(_Methods):
    """A model that the C interface opened."""

    def __init__(self, opened: c_interface.Model) -> None:
        self._model, self._open = opened, True
        self._run = opened.run_method

    def close(self) -> None:
        """Closes it; once more does no harm, as in Python."""
        if self._open:
            self._open = False
            self._model.close()

    def session(self, **sizes: int) -> CSession:
        """Opens a session."""
        return CSession(called(self._model.session, **sizes), sizes)

    def swap_weights(self, source: Path | Mapping[str, torch.Tensor]) -> None:
        """Takes the weights of a file, or those that it writes to one."""
        if isinstance(source, Mapping):
            path = Path(os.environ["EXPORTKIT_CACHE"]).with_name("weights.safetensors")
            save_file({name: tensor.detach().clone().contiguous() for name, tensor in source.items()}, path)
            source = path
        called(self._model.swap_weights, source)


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
